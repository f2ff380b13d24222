"""Reading a speculator's checkpoint in any of the formats it exists in.

    an fms file      ``.pth``: {"model_state": {name: tensor}} or {name: tensor}, without a config
    a folder         ``config.json`` with safetensors or pytorch ``.bin`` files, one or shards
    a Hub id         downloaded, then a folder

Pickles are read with ``weights_only=True`` and no other way: a file that holds anything but tensors
and plain containers is refused.

Boundary: tensors as they are, under the names they have; what they mean is `layout`'s business.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_specdec.modeling.checkpoint_headers import asked_for, read_header, read_index, read_json

FMS_SUFFIXES = (".pth", ".pt")
_STATE = "model_state"
# In this order transformers looks for weights, too.
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A checkpoint that was read.

    Attributes:
        path: the file or folder.
        kind: its format, for people.
        tensors: name to tensor, on the CPU; memory of the files' own where possible.
        config: the config's fields, ``None`` where there is none.
        files: what else is in the folder, relative to it: neither weights nor config.
        left_out: what is beside the weights and not carried over: keys of an fms file that are no
            part of the model, weights files of a folder that its checkpoint doesn't name.
    """

    path: Path
    kind: str
    tensors: dict[str, Tensor]
    config: dict[str, Any] | None
    files: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()


def read_source(name: str | Path) -> Source:
    """Read a checkpoint.

    Raises:
        ValueError: nothing there, no weights, a pickle that holds more than tensors, or something
            beside the weights that would be lost.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in FMS_SUFFIXES:
            raise ValueError(
                f"SOURCE={str(path)!r} is a file, but no fms checkpoint "
                f"({' or '.join(FMS_SUFFIXES)}); for the other formats name the folder that holds "
                "config.json and the weights"
            )
        return _fms(path)
    if path.is_dir():
        return _folder(path)
    return _folder(_downloaded(str(name)))


def _fms(path: Path) -> Source:
    content = _unpickled(path)
    if not isinstance(content, dict):
        raise ValueError(
            f"SOURCE={str(path)!r} holds a {type(content).__name__}; an fms checkpoint is a dict "
            f"of tensors, or {{{_STATE!r}: such a dict}}"
        )
    rest: dict[Any, Any] = {}
    state = content
    if _STATE in content:
        rest, state = {k: v for k, v in content.items() if k != _STATE}, content[_STATE]
    if not isinstance(state, dict) or not state:
        raise ValueError(f"SOURCE={str(path)!r}: its {_STATE} is no dict of tensors, or empty")
    if others := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"SOURCE={str(path)!r}: {others[:8]} are no tensors; an fms checkpoint is a dict "
            f"of tensors, or {{{_STATE!r}: such a dict}}"
        )
    if lost := [str(key) for key, value in rest.items() if _holds_tensors(value)]:
        raise ValueError(
            f"SOURCE={str(path)!r} has tensors under {lost} beside {_STATE}, which no speculator "
            f"has a place for and which would be lost. Save {{{_STATE!r}: ...}} alone first"
        )
    kind = f"fms .pth, {_STATE}" if _STATE in content else "fms .pth, bare"
    return Source(path, kind, dict(state), None, left_out=tuple(str(key) for key in rest))


def _folder(path: Path) -> Source:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ValueError(f"SOURCE={str(path)!r} has no config.json, so it is no checkpoint folder")
    with _named():
        config = read_json(config_file)
    found = [name for name in _WEIGHTS if (path / name).is_file()]
    if not found:
        raise ValueError(f"SOURCE={str(path)!r} has no weights; looked for {', '.join(_WEIGHTS)}")
    first = found[0]
    files = _shards(path, first) if first.endswith(".index.json") else [first]
    tensors: dict[str, Tensor] = {}
    for file in files:
        shard = _loaded(path / file) if file.endswith(".safetensors") else _pickled(path / file)
        if twice := sorted(set(tensors) & set(shard)):
            raise ValueError(f"SOURCE={str(path)!r} has {twice[:8]} twice, the second in {file}")
        tensors |= shard
    kind = "safetensors" if files[0].endswith(".safetensors") else "pytorch .bin"
    if len(files) > 1:
        kind += f", {len(files)} shards"
    unread = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin"))
    left_out = tuple(name for name in unread if name not in files)
    return Source(path, kind, tensors, config, _other_files(path), left_out)


def _shards(path: Path, index: str) -> list[str]:
    """The files that an index names."""
    with _named():
        files = sorted(set(read_index(path / index).values()))
    for file in files:
        if not (path / file).is_file():
            raise ValueError(f"SOURCE={str(path)!r}: {index} names {file}, which isn't there")
    return files


def _loaded(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    with _named():
        read_header(path)
    return load_file(path)


@contextmanager
def _named() -> Iterator[None]:
    """Errors about files name the argument that led to them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"SOURCE: {error}") from None


def _pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.bin`` file."""
    content = _unpickled(path)
    if not isinstance(content, dict):
        raise ValueError(f"SOURCE: {str(path)!r} holds a {type(content).__name__}, no dict")
    if others := [key for key, value in content.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"SOURCE: {others[:8]} in {str(path)!r} are no tensors")
    return dict(content)


def _other_files(path: Path) -> tuple[Path, ...]:
    """Everything but config and weights, in any format; a tokenizer above all."""
    files = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
    weights = (".safetensors", ".bin", ".pth", ".pt", ".index.json")
    return tuple(
        file
        for file in files
        if file != Path("config.json")
        and not file.name.endswith(weights)
        and not any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    )


def _unpickled(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Files of before torch 1.6 can't be mapped.
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"SOURCE: {str(path)!r} is no pickle of tensors alone, and reading anything else would "
            f"run code from it: {asked_for(error)}"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"SOURCE: {str(path)!r} can't be read as a torch checkpoint: "
            f"{str(error).partition(chr(10))[0] or 'it ends too early'}"
        ) from None


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensors(entry) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(entry) for entry in value)
    return isinstance(value, Tensor)


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"SOURCE={name!r} is neither a file nor a folder, nor a model that the Hub hands out: "
            f"{str(error).partition(chr(10))[0]}"
        ) from None
