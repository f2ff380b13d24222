"""What doesn't fit any more says so when hf_specdec is imported, with what and which versions."""

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerationMixin

import hf_specdec
from hf_specdec import public, seams

ROOT = Path(hf_specdec.__file__).parents[1]
ALL = (*seams.ENGINE, *seams.SERVING)


def owner_of(seam: seams.Seam) -> tuple[Any, str]:
    """What really holds a seam's last name: a module, or the class that defines it."""
    owner: Any = importlib.import_module(seam.module)
    *path, name = seam.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    if isinstance(owner, type):
        owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    return owner, name


def need_serving(seam: seams.Seam) -> None:
    if seam in seams.SERVING:
        pytest.importorskip("fastapi")


def test_these_versions_fit() -> None:
    seams.check(seams.ENGINE)


@pytest.mark.parametrize("seam", ALL, ids=lambda seam: f"{seam.module}.{seam.name}")
def test_what_is_gone_is_named(seam: seams.Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    need_serving(seam)
    owner, name = owner_of(seam)
    monkeypatch.delattr(owner, name)
    # A package that imports lazily would look for it again.
    monkeypatch.delitem(getattr(owner, "_class_to_module", {}), name, raising=False)
    package = seam.module.partition(".")[0]
    # Every class has a constructor, and an abstract one a method register: of other parameters.
    with pytest.raises(ImportError, match=rf"{seam.name} \((is missing|no parameters)") as caught:
        seams.check((seam,))
    supported = seams.SUPPORTED[package]
    version = importlib.import_module(package).__version__
    assert f"supports {package} {supported}; in {version}, which is installed, has" in str(
        caught.value
    )
    assert f"Install '{package}{supported}'" in str(caught.value)


@pytest.mark.parametrize(
    "seam", [seam for seam in ALL if seam.parameters], ids=lambda seam: f"{seam.module}.{seam.name}"
)
def test_parameters_that_are_gone_are_named(
    seam: seams.Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_serving(seam)
    monkeypatch.setattr(*owner_of(seam), lambda: None)
    with pytest.raises(ImportError, match=rf"no parameters \[.*'{seam.parameters[-1]}'\]"):
        seams.check((replace(seam, mentions=()),))


@pytest.mark.parametrize(
    "seam", [seam for seam in ALL if seam.mentions], ids=lambda seam: seam.name
)
def test_code_that_does_something_else_is_named(
    seam: seams.Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields of a generation config, for one: nothing but the code that sets them tells."""
    monkeypatch.setattr(*owner_of(seam), lambda self, **kwargs: None)
    with pytest.raises(ImportError, match=rf"doesn't use \[.*'{seam.mentions[-1]}'\]"):
        seams.check((seam,))


def test_another_kind_of_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer) -> tuple:
        return ()

    monkeypatch.setattr(GenerationMixin, "_extract_generation_mode_kwargs", changed)
    with pytest.raises(ImportError, match=r"generation_mode_kwargs \(returns tuple, not dict\)"):
        seams.check(seams.ENGINE)


def test_a_new_abstract_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our cache layers could not be made."""
    methods = frozenset({*CacheLayerMixin.__abstractmethods__, "compress"})
    monkeypatch.setattr(CacheLayerMixin, "__abstractmethods__", methods)
    with pytest.raises(ImportError, match=r"CacheLayerMixin \(wants methods \['compress'\] of"):
        seams.check(seams.ENGINE)


def test_everything_that_is_gone_is_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.cache_utils.get_layer_types_and_kwargs")
    monkeypatch.delattr("transformers.masking_utils.sdpa_mask")
    message = r"get_layer_types_and_kwargs \(is missing\); transformers.*sdpa_mask \(is missing\)\."
    with pytest.raises(ImportError, match=message):
        importlib.reload(public)


def test_serving_is_looked_at_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    serving = importlib.import_module("hf_specdec.serving")
    monkeypatch.delattr("transformers.cli.serving.utils.ToolCall")
    with pytest.raises(ImportError, match=r"in .*, which is installed, has changed: .*ToolCall"):
        importlib.reload(serving)


def test_a_package_that_is_not_installed_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    monkeypatch.setattr(seams.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="fastapi"):
        seams.check(seams.SERVING)


def test_a_newer_version_is_used_without_a_word(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(transformers, "__version__", "9.0.0")
    seams.check(seams.ENGINE)
    assert not recwarn.list


def imported_names() -> Iterator[tuple[str, str, str]]:
    """File, module and name of everything imported from inside transformers."""
    files = [*(ROOT / "hf_specdec").rglob("*.py"), *(ROOT / "modeling").rglob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                if not (node.module or "").startswith("transformers."):
                    continue
                for alias in node.names:
                    yield str(path.relative_to(ROOT)), str(node.module), alias.name


def test_every_name_taken_from_inside_transformers_has_a_row() -> None:
    known = {f"{seam.module}.{seam.name}" for seam in ALL}
    known |= {name.rpartition(".")[0] for name in known}
    # The package hands out what its modules define.
    public = {n.replace("generation.utils.", "generation.") for n in known}
    known |= public | {n.replace("generation.stopping_criteria.", "generation.") for n in known}
    missing = [
        f"{path}: {module}.{name}"
        for path, module, name in imported_names()
        if not any(f"{module}.{name}" == k or k.startswith(f"{module}.{name}.") for k in known)
    ]
    # Modules, of which the names that are used have rows.
    modules = {"transformers.generation.logits_process", "transformers.pipelines.base"}
    modules |= {"transformers.utils.logging"}
    assert [m for m in missing if m.rpartition(" ")[2] not in modules] == []
    assert len(list(imported_names())) > 40


def test_supported_versions_are_those_that_pip_is_told() -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, versions in seams.SUPPORTED.items():
        assert f"{package}{versions}" in project["dependencies"]
