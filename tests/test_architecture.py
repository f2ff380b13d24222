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

# Folders whose files are units of their own.
OPENED = ("options", "caches", "targets", "call")

# Unit (a file or folder directly in hf_specdec/, a file of an opened folder, or modeling/) -> the
# units it may import. Every unit may import errors and _version. A new unit needs a row here.
MAY_IMPORT: dict[str, set[str]] = {
    "options": set(),
    "options.config": {
        "options.lookup_options",
        "options.schedule",
        "options.tree_words",
        "options.vllm_words",
    },
    "options.lookup_options": set(),
    "options.schedule": set(),
    "options.tree_words": set(),
    "options.vllm_words": set(),
    "caches": set(),
    "caches.cache_layers": {"cache_moves", "devices", "kernels"},
    "caches.ragged_cache": {"cache_moves", "caches.cache_layers", "devices", "tree"},
    "caches.static_cache": {"caches.cache_layers", "caches.ragged_cache", "static_shapes"},
    "targets": set(),
    "targets.adapters": {"targets.wrappers"},
    "targets.attention": set(),
    "targets.layer_types": set(),
    "targets.lockstep": {"targets.prompt", "targets.target"},
    "targets.masked_attention": {"targets.attention"},
    "targets.packing": {"targets.slow_dtypes"},
    "targets.prompt": set(),
    "targets.reach": {"targets.prompt"},
    "targets.recorded_states": {"modeling"},
    "targets.slow_dtypes": {"modeling"},
    "targets.static_target": {
        "caches.static_cache",
        "static_shapes",
        "targets.prompt",
        "targets.recorded_states",
        "targets.switches",
        "targets.target",
        "tree",
    },
    "targets.switches": {"targets.attention", "targets.masked_attention", "targets.uncompiled"},
    "targets.target": {
        "caches.cache_layers",
        "caches.ragged_cache",
        "devices",
        "modeling",
        "targets.attention",
        "targets.layer_types",
        "targets.masked_attention",
        "targets.prompt",
        "targets.switches",
        "tree",
    },
    "targets.training_mode": set(),
    "targets.uncompiled": set(),
    "targets.wrappers": set(),
    "call": set(),
    "call.call_options": {
        "auto_length",
        "call.compatibility",
        "drafters",
        "options.config",
        "options.lookup_options",
        "options.schedule",
        "options.tree_words",
        "tree",
        "tree_shape",
    },
    "call.compatibility": {
        "drafters",
        "options.tree_words",
        "outputs",
        "static_shapes",
        "streaming",
        "targets.adapters",
        "targets.layer_types",
        "targets.lockstep",
        "targets.masked_attention",
        "targets.training_mode",
    },
    "call.compile_options": {
        "call.compatibility",
        "call.decoding_settings",
        "modeling",
        "options.schedule",
        "outputs",
        "static_shapes",
        "targets.layer_types",
        "targets.recorded_states",
    },
    "call.decoding_settings": {
        "metrics",
        "options.lookup_options",
        "options.schedule",
        "outputs",
        "ranks",
        "tree_shape",
    },
    "call.resolution": {
        "call.compatibility",
        "drafters",
        "modeling",
        "options.config",
        "options.schedule",
        "options.tree_words",
        "registry",
    },
    "call.runners": {
        "call.compatibility",
        "call.compile_options",
        "call.decoding_settings",
        "static_shapes",
        "targets.layer_types",
        "targets.lockstep",
        "targets.prompt",
        "targets.static_target",
        "targets.target",
    },
    "_version": set(),
    "errors": set(),
    "tree": {"options.tree_words"},
    "tree_shape": {"options.tree_words", "tree"},
    "tree_steps": {
        "drafters",
        "drafting",
        "modeling",
        "outputs",
        "processors",
        "proposals",
        "ranks",
        "targets.target",
        "tree",
        "tree_shape",
        "tree_verification",
        "verification",
    },
    "tree_verification": {"targets.target", "tree", "verification"},
    "noise": set(),
    "kernels": {"cache_moves", "noise"},
    "devices": set(),
    "cache_moves": set(),
    "metrics": set(),
    "processors": set(),
    "stopping": set(),
    "streaming": set(),
    "modeling": set(),
    "proposals": {"drafters", "drafting", "tree"},
    "static_shapes": {"modeling"},
    "outputs": {"targets.target"},
    "drafting": {"modeling", "noise", "processors", "verification"},
    "verification": {"kernels", "modeling", "noise"},
    "drafters": {
        "caches.ragged_cache",
        "kernels",
        "metrics",
        "modeling",
        "noise",
        "options.config",
        "options.lookup_options",
        "prompt_lookup",
        "static_shapes",
        "targets.attention",
        "targets.prompt",
        "targets.recorded_states",
        "tree",
    },
    "registry": {"drafters", "modeling", "targets.wrappers"},
    "prompt_lookup": {"options.lookup_options"},
    "decoding": {
        "caches.ragged_cache",
        "call.decoding_settings",
        "common_call",
        "drafters",
        "drafting",
        "metrics",
        "modeling",
        "noise",
        "options.config",
        "options.schedule",
        "outputs",
        "processors",
        "prompt_lookup",
        "proposals",
        "stopping",
        "streaming",
        "targets.prompt",
        "targets.target",
        "tree_shape",
        "tree_steps",
        "verification",
    },
    "auto_length": {"options.schedule"},
    "ranks": {"modeling"},
    "common_call": {
        "auto_length",
        "call.decoding_settings",
        "drafters",
        "ranks",
        "targets.prompt",
        "tree",
        "tree_shape",
        "verification",
    },
    "integration": {
        "caches.ragged_cache",
        "call.call_options",
        "call.compatibility",
        "call.compile_options",
        "call.decoding_settings",
        "call.resolution",
        "call.runners",
        "common_call",
        "decoding",
        "drafters",
        "metrics",
        "modeling",
        "options.config",
        "options.schedule",
        "pipelines",
        "ranks",
        "registry",
        "targets.adapters",
        "targets.lockstep",
        "targets.prompt",
        "targets.reach",
        "targets.slow_dtypes",
        "targets.target",
    },
    "doctor": {"drafters", "metrics", "registry"},
    "conversion": {"modeling"},
    "publishing": {"modeling"},
    "pipelines": {"call.resolution", "options.config", "registry"},
    "agreement": set(),
    "benchmarking": {
        "agreement",
        "call.compatibility",
        "drafters",
        "metrics",
        "modeling",
        "options.schedule",
        "options.tree_words",
        "registry",
        "targets.packing",
        "targets.prompt",
    },
    "attach": {
        "call.compatibility",
        "call.resolution",
        "integration",
        "metrics",
        "options.config",
        "targets.adapters",
        "targets.wrappers",
    },
    "startup": set(),
    "public": {
        "attach",
        "drafters",
        "integration",
        "metrics",
        "modeling",
        "options.config",
        "publishing",
        "registry",
        "seams",
        "static_shapes",
        "stopping",
        "streaming",
        "targets.packing",
    },
    "seams": set(),
    "writer_lock": set(),
    "serving": {
        "metrics",
        "modeling",
        "seams",
        "stopping",
        "streaming",
    },
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
    """Returns the unit of a dotted module name: its second part, of an opened folder the third."""
    parts = module.split(".")
    if len(parts) > 2 and parts[1] in OPENED and parts[2] != "__init__":
        return ".".join(parts[1:3])
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


def test_folders_import_one_way() -> None:
    """What is seen from outside a folder: no two lead to each other, over any number of others."""
    leads_to: dict[str, set[str]] = {}
    for unit, imported in MAY_IMPORT.items():
        folder = unit.split(".")[0]
        leads_to.setdefault(folder, set()).update(other.split(".")[0] for other in imported)
    for folder in leads_to:
        seen: set[str] = set()
        ahead = leads_to[folder] - {folder}
        while ahead:
            seen |= ahead
            ahead = set().union(*(leads_to.get(other, set()) for other in ahead)) - seen
        assert folder not in seen, f"{folder} imports {sorted(leads_to[folder])}, which lead back"


@pytest.mark.parametrize(("module", "path"), source_files(), ids=lambda value: str(value))
def test_only_integration_touches_private_internals(module: str, path: Path) -> None:
    assert seam_violations(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_specdec.modeling.mlp_speculator.modeling", "from hf_specdec.drafters import base"),
        ("hf_specdec.modeling.mlp_speculator.modeling", "from ...noise import gumbel"),
        ("hf_specdec.noise", "import hf_specdec.options.config"),
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
