"""Published code is the package's own: equal but for its first line and its imports."""

import ast
import re
from pathlib import Path

import pytest

from hf_specdec.publishing.remote_code import (
    MODELING,
    REMOTE_CODE,
    flattened,
    is_copied,
    original,
    remote_code_files,
)

MODEL_TYPES = sorted(REMOTE_CODE)


def without_imports(text: str) -> str:
    """A module without its imports; comments and spacing are kept."""
    lines: list[str | None] = list(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [None] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line for line in lines if line is not None)


def imports(text: str) -> list[str]:
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_copies_equal_their_source_modulo_imports(model_type: str) -> None:
    files = remote_code_files(model_type)
    for name, text in files.items():
        source = original(REMOTE_CODE[model_type].folder, Path(name).stem)
        first, _, copy = text.partition("\n")
        assert first.startswith("# Copied from hf_specdec")
        assert source.relative_to(MODELING).as_posix() in first
        assert is_copied(text) and not is_copied(copy)
        assert without_imports(copy) == without_imports(source.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_copies_import_each_other_and_nothing_of_the_package(model_type: str) -> None:
    files = remote_code_files(model_type)
    for name, text in files.items():
        assert "hf_specdec." not in "\n".join(imports(text)), name
        needed = re.findall(r"^from \.([\w.]+) import", "\n".join(imports(text)), re.MULTILINE)
        assert {f"{module}.py" for module in needed} <= files.keys()
        # All of the imports are of a form that transformers follows.
        assert needed.count("") == 0 and "from . import" not in text
        compile(text, name, "exec")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_classes_of_the_auto_map_are_there(model_type: str) -> None:
    files = remote_code_files(model_type)
    for reference in REMOTE_CODE[model_type].auto_map.values():
        module, name = reference.split(".")
        tree = ast.parse(files[f"{module}.py"])
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_all_of_the_speculators_modules_are_copied() -> None:
    modules = {path.name for path in (MODELING / "mlp_speculator").glob("*.py")} - {"__init__.py"}
    shared = {
        f"{name}.py"
        for name in (
            "card_on_save", "checkpoint_files", "checkpoint_headers", "config_fields", "largest",
        )
    }  # fmt: skip
    assert remote_code_files("mlp_speculator").keys() == modules | shared


def test_flattened() -> None:
    text = (
        "from hf_specdec.modeling.other.place import A\n"
        "from .here import (\n    B,\n)\n"
        "def f():\n    from hf_specdec.modeling.place import C\n"
        "x = 'from hf_specdec.modeling is text'\n"
    )
    assert flattened(text) == (
        "from .place import A\n"
        "from .here import (\n    B,\n)\n"
        "def f():\n    from .place import C\n"
        "x = 'from hf_specdec.modeling is text'\n"
    )


def test_unknown_model_type() -> None:
    with pytest.raises(ValueError, match="model_type='llama' has no remote code"):
        remote_code_files("llama")
