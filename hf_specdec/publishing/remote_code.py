"""The networks' own files, flat and self-contained, for ``trust_remote_code=True``.

Boundary: which files, and their imports. The source of what is written is `hf_specdec.modeling` and
nothing else: a copy differs from its original in a comment at the top and in its imports.

transformers looks for a repository's modules in one folder and follows ``from .x import``; imports
of the package's own become imports of that kind. Where hf_specdec is installed its classes are
registered and win over the copies.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from hf_specdec import modeling
from hf_specdec._version import __version__

MODELING = Path(modeling.__file__).parent
_HEADER = "# Copied from hf_specdec"
_OWN_IMPORT = re.compile(r"^(\s*from )(hf_specdec\.modeling[\w.]*|\.\w+)( import )", re.MULTILINE)
_RELATIVE = re.compile(r"^\s*from \.(\w+) import ", re.MULTILINE)


@dataclass(frozen=True)
class RemoteCode:
    """What a model type's repository carries.

    Attributes:
        folder: of `hf_specdec.modeling`.
        auto_map: for ``config.json``: auto class to ``module.Class``.
    """

    folder: str
    auto_map: dict[str, str]


REMOTE_CODE: dict[str, RemoteCode] = {
    "mlp_speculator": RemoteCode(
        "mlp_speculator",
        {
            "AutoConfig": "configuration_mlp_speculator.MLPSpeculatorConfig",
            "AutoModel": "modeling_mlp_speculator.MLPSpeculatorPreTrainedModel",
        },
    ),
    "mimo": RemoteCode(
        "mimo",
        {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModel": "modeling_mimo.MiMoModel",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
    ),
}


def remote_code_files(model_type: str) -> dict[str, str]:
    """The files of a model type's remote code: name to content.

    Raises:
        ValueError: a model type that has none.
    """
    if model_type not in REMOTE_CODE:
        raise ValueError(
            f"model_type={model_type!r} has no remote code; there is some for {sorted(REMOTE_CODE)}"
        )
    code = REMOTE_CODE[model_type]
    waiting = [reference.partition(".")[0] for reference in code.auto_map.values()]
    files: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        if f"{module}.py" in files:
            continue
        source = original(code.folder, module)
        text = flattened(source.read_text(encoding="utf-8"))
        files[f"{module}.py"] = header(source) + text
        waiting += _RELATIVE.findall(text)
    return dict(sorted(files.items()))


def original(folder: str, module: str) -> Path:
    """The file of `hf_specdec.modeling` that a module is copied from."""
    own = MODELING / folder / f"{module}.py"
    return own if own.exists() else MODELING / f"{module}.py"


def flattened(text: str) -> str:
    """A module whose imports of `hf_specdec.modeling` are of its own folder."""

    def flat(match: re.Match[str]) -> str:
        return f"{match[1]}.{match[2].rpartition('.')[2]}{match[3]}"

    return _OWN_IMPORT.sub(flat, text)


def copied(source: Path) -> str:
    """A file of the package as it is published, with a note of where it comes from."""
    return header(source) + source.read_text(encoding="utf-8")


def is_copied(text: str) -> bool:
    """Whether a file was written by this package, of any version."""
    return text.startswith(_HEADER)


def header(source: Path) -> str:
    """The first line of a copy."""
    folder = MODELING if source.is_relative_to(MODELING) else Path(__file__).parent
    name = f"{folder.name}/{source.relative_to(folder).as_posix()}"
    return f"{_HEADER} {__version__}, {name} (Apache-2.0).\n"
