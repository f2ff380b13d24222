"""The tree is the architecture: imports point one way, and the package list is complete.

Read from the source by ast, so neither torch nor an installed hf_specdec is needed.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = "hf_specdec"

# Unit (a file or folder directly in hf_specdec/, or modeling/) -> the units it may import.
# Every unit may import errors and _version. A new unit needs a row here.
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "config": {"lookup_options", "schedule", "tree_words", "vllm_words"},
    "tree": {"tree_words"},
    "tree_shape": {"tree", "tree_words"},
    "tree_steps": {
        "drafters",
        "drafting",
        "modeling",
        "outputs",
        "processors",
        "proposals",
        "ranks",
        "target",
        "tree",
        "tree_shape",
        "tree_verification",
        "verification",
    },
    "tree_verification": {"target", "tree", "verification"},
    "tree_words": set(),
    "vllm_words": set(),
    "noise": set(),
    "kernels": {"cache_moves", "noise"},
    "cache": {"cache_layers", "cache_moves", "devices", "tree"},
    "cache_layers": {"cache_moves", "devices", "kernels"},
    "devices": set(),
    "cache_moves": set(),
    "metrics": set(),
    "processors": set(),
    "stopping": set(),
    "streaming": set(),
    "modeling": set(),
    "attention": set(),
    "masked_attention": {"attention"},
    "uncompiled": set(),
    "switches": {"attention", "masked_attention", "uncompiled"},
    "wrappers": set(),
    "adapters": {"wrappers"},
    "training_mode": set(),
    "reach": {"prompt"},
    "layer_types": set(),
    "packing": set(),
    "prompt": set(),
    "proposals": {"drafters", "drafting", "tree"},
    "schedule": set(),
    "target": {
        "attention",
        "cache",
        "cache_layers",
        "devices",
        "layer_types",
        "masked_attention",
        "modeling",
        "prompt",
        "switches",
        "tree",
    },
    "lockstep": {"target", "prompt"},
    "static_shapes": {"modeling"},
    "static_cache": {"cache", "cache_layers", "static_shapes"},
    "recorded_states": {"modeling"},
    "static_target": {
        "prompt",
        "recorded_states",
        "static_cache",
        "static_shapes",
        "switches",
        "target",
        "tree",
    },
    "compile_options": {
        "compatibility",
        "decoding_settings",
        "modeling",
        "layer_types",
        "outputs",
        "recorded_states",
        "schedule",
        "static_shapes",
    },
    "outputs": {"target"},
    "drafting": {"modeling", "noise", "processors", "verification"},
    "verification": {"kernels", "modeling", "noise"},
    "drafters": {
        "attention",
        "modeling",
        "noise",
        "config",
        "metrics",
        "prompt",
        "lookup_options",
        "prompt_lookup",
        "cache",
        "kernels",
        "recorded_states",
        "static_shapes",
        "tree",
    },
    "registry": {"modeling", "drafters", "wrappers"},
    "lookup_options": set(),
    "prompt_lookup": {"lookup_options"},
    "decoding_settings": {
        "lookup_options",
        "metrics",
        "outputs",
        "ranks",
        "schedule",
        "tree_shape",
    },
    "decoding": {
        "common_call",
        "decoding_settings",
        "prompt_lookup",
        "drafters",
        "verification",
        "noise",
        "cache",
        "metrics",
        "modeling",
        "config",
        "processors",
        "stopping",
        "streaming",
        "target",
        "drafting",
        "outputs",
        "prompt",
        "proposals",
        "schedule",
        "tree_shape",
        "tree_steps",
    },
    "auto_length": {"schedule"},
    "call_options": {
        "auto_length",
        "compatibility",
        "config",
        "drafters",
        "lookup_options",
        "schedule",
        "tree",
        "tree_shape",
        "tree_words",
    },
    "ranks": {"modeling"},
    "common_call": {
        "auto_length",
        "decoding_settings",
        "drafters",
        "prompt",
        "ranks",
        "tree",
        "tree_shape",
        "verification",
    },
    "compatibility": {
        "adapters",
        "drafters",
        "layer_types",
        "lockstep",
        "masked_attention",
        "outputs",
        "static_shapes",
        "streaming",
        "training_mode",
        "tree_words",
    },
    "runners": {
        "compatibility",
        "compile_options",
        "decoding_settings",
        "layer_types",
        "lockstep",
        "prompt",
        "static_shapes",
        "static_target",
        "target",
    },
    "integration": {
        "adapters",
        "call_options",
        "common_call",
        "ranks",
        "compile_options",
        "runners",
        "decoding",
        "decoding_settings",
        "drafters",
        "registry",
        "config",
        "metrics",
        "modeling",
        "cache",
        "target",
        "lockstep",
        "prompt",
        "schedule",
        "compatibility",
        "pipelines",
        "reach",
        "resolution",
    },
    "resolution": {
        "compatibility",
        "config",
        "drafters",
        "modeling",
        "registry",
        "schedule",
        "tree_words",
    },
    "doctor": {"drafters", "metrics", "registry"},
    "conversion": {"modeling"},
    "publishing": {"modeling"},
    "pipelines": {"config", "registry", "resolution"},
    "agreement": set(),
    "benchmarking": {
        "agreement",
        "compatibility",
        "drafters",
        "metrics",
        "modeling",
        "packing",
        "prompt",
        "registry",
        "schedule",
        "tree_words",
    },
    "attach": {
        "adapters",
        "compatibility",
        "config",
        "integration",
        "metrics",
        "resolution",
        "wrappers",
    },
    "startup": set(),
    "public": {
        "attach",
        "config",
        "drafters",
        "integration",
        "metrics",
        "modeling",
        "packing",
        "publishing",
        "registry",
        "seams",
        "static_shapes",
        "stopping",
        "streaming",
    },
    "seams": set(),
    "writer_lock": set(),
    "serving": {"metrics", "modeling", "seams", "stopping", "streaming"},
}
# These may import all units but the ones named.
MAY_NOT_IMPORT: dict[str, set[str]] = {
    "__init__": {"cli", "serving", "training"},
    "training": {"cli", "serving"},
    "cli": set(),
    "__main__": set(),
}
IMPORTED_BY_ALL = {"errors", "_version"}

# transformers' private generation internals, which only integration.py may touch.
SEAMS = "integration"
PRIVATE_MODULES = ("transformers.generation.utils", "transformers.pipelines")
PRIVATE_METHODS = {
    "_assisted_decoding",
    "_get_candidate_generator",
    "_get_logits_processor",
    "_get_stopping_criteria",
    "_prepare_special_tokens",
    "_sample",
    "_update_model_kwargs_for_generation",
    "_validate_assistant",
}


def source_files() -> list[tuple[str, Path]]:
    """Returns (dotted module name, file) of every module; the link to modeling/ is not followed."""
    files = []
    for folder, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "modeling", f"{PACKAGE}.modeling")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder.name == PACKAGE and parts[0] == "modeling":
                continue
            files.append((".".join((prefix, *parts)), path))
    return files


def unit_of(module: str) -> str:
    """Returns the unit of a dotted module name: its second part."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(module: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields (full dotted name, line) of everything imported, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def imported_unit(name: str) -> str | None:
    """Returns the unit that an imported name belongs to, None for other projects' names."""
    if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
        return None
    unit = unit_of(name)
    # `from hf_specdec import SpeculativeConfig`: a public name, not a module.
    return unit if unit in MAY_IMPORT or unit in MAY_NOT_IMPORT else "__init__"


def is_allowed(unit: str, imported: str) -> bool:
    if imported == unit or imported in IMPORTED_BY_ALL:
        return True
    if unit in MAY_NOT_IMPORT:
        return imported not in MAY_NOT_IMPORT[unit]
    return imported in MAY_IMPORT[unit]


def import_violations(module: str, source: str) -> list[str]:
    unit = unit_of(module)
    return [
        f"{module}:{line} imports {name}: {unit} may not import {imported}"
        for name, line in imports_of(module, ast.parse(source))
        if (imported := imported_unit(name)) is not None and not is_allowed(unit, imported)
    ]


def seam_violations(module: str, source: str) -> list[str]:
    if unit_of(module) == SEAMS:
        return []
    tree = ast.parse(source)
    found = []
    for name, line in imports_of(module, tree):
        private_name = name.startswith("transformers.") and name.rsplit(".", 1)[1].startswith("_")
        if private_name or f"{name}.".startswith(tuple(f"{m}." for m in PRIVATE_MODULES)):
            found.append(f"{module}:{line} imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_METHODS:
            found.append(f"{module}:{node.lineno} uses {node.attr}")
    return found


def test_every_unit_has_a_row() -> None:
    units = {unit_of(module) for module, _ in source_files()}
    unknown = units - MAY_IMPORT.keys() - MAY_NOT_IMPORT.keys()
    assert not unknown, f"say in MAY_IMPORT what these may import: {sorted(unknown)}"


@pytest.mark.parametrize(("module", "path"), source_files(), ids=lambda value: str(value))
def test_imports_point_one_way(module: str, path: Path) -> None:
    assert import_violations(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("module", "path"), source_files(), ids=lambda value: str(value))
def test_only_integration_touches_private_internals(module: str, path: Path) -> None:
    assert seam_violations(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_specdec.modeling.mlp_speculator.modeling", "from hf_specdec.drafters import base"),
        ("hf_specdec.modeling.mlp_speculator.modeling", "from ...noise import gumbel"),
        ("hf_specdec.noise", "import hf_specdec.config"),
        ("hf_specdec.drafters.mlp", "def f():\n    from hf_specdec import decoding"),
        ("hf_specdec.metrics", "from hf_specdec import SpeculativeConfig"),
        ("hf_specdec.training.stage1", "from hf_specdec.cli.report import Run"),
    ],
)
def test_upward_import_is_found(module: str, source: str) -> None:
    assert len(import_violations(module, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from transformers.generation.utils import GenerationMixin",
        "from transformers.generation.candidate_generator import _crop_past_key_values",
        "import transformers.pipelines.base",
        "def f(target):\n    return target._assisted_decoding()",
    ],
)
def test_private_internals_are_found(source: str) -> None:
    assert len(seam_violations("hf_specdec.decoding", source)) == 1
    assert seam_violations("hf_specdec.integration", source) == []


def test_package_list_is_complete() -> None:
    """A package missing from the list works in an editable install and is absent from the wheel."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    in_tree = {
        module.removesuffix(".__init__")
        for module, path in source_files()
        if path.name == "__init__.py"
    }
    assert sorted(listed) == sorted(in_tree)


def test_modeling_is_one_tree() -> None:
    """hf_specdec/modeling is the link that lets in-tree tools see modeling/, not a second copy."""
    link = ROOT / PACKAGE / "modeling"
    if link.exists():
        assert link.resolve() == ROOT / "modeling"
