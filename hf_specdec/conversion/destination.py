"""Writing a converted checkpoint, all of it or nothing.

A file or folder is complete before it gets its name: it is written beside the destination, checked,
and renamed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hf_specdec.conversion.layout import listed
from hf_specdec.conversion.sources import FMS_SUFFIXES, Source
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel


def check_destination(source: Path, destination: Path, force: bool) -> None:
    """Raise ValueError for a destination that would destroy something, or that can't be.

    Args:
        source: must be another place.
        destination: a file or folder, there already or not.
        force: it may be replaced.
    """
    here, there = destination.resolve(), source.resolve()
    if here == there or here in there.parents or (source.is_dir() and there in here.parents):
        raise ValueError(
            f"DEST={str(destination)!r} is SOURCE, or one is inside the other; name another place"
        )
    if not destination.exists():
        return
    is_fms = destination.suffix in FMS_SUFFIXES
    if destination.is_dir() == is_fms:
        what, wanted = ("a folder", "a file") if is_fms else ("a file", "a folder")
        raise ValueError(
            f"DEST={str(destination)!r} is {what}, but {wanted} is to be written there"
        )
    is_free = destination.is_dir() and not any(destination.iterdir())
    if not is_free and not force:
        raise ValueError(
            f"DEST={str(destination)!r} exists and isn't empty; name another place, or pass "
            "--force to replace it with all that is in it"
        )


def write_fms(path: Path, tensors: Mapping[str, Tensor], force: bool) -> None:
    """Write ``{"model_state": tensors}``; names with the same tensor share its storage.

    Raises:
        ValueError: the file is there and ``force`` isn't set.
    """
    # A tensor may be a view of a whole mapped file, which would be saved with it.
    own = {id(tensor): _compact(tensor) for tensor in tensors.values()}
    with _replacing(path, force) as temporary:
        torch.save({"model_state": {n: own[id(t)] for n, t in tensors.items()}}, temporary)
        written = torch.load(temporary, weights_only=True, mmap=True)["model_state"]
        _check_complete(set(tensors), set(written), path)


def write_folder(
    path: Path,
    config: MLPSpeculatorConfig,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    source: Source,
    force: bool,
) -> None:
    """Write config and safetensors as ``save_pretrained`` does, and the source's other files.

    Args:
        path: the folder.
        config: of the result.
        tensors: under the network's names, aliases left out.
        aliases: alias to the name it stands for.
        source: its other files are copied.
        force: replace the folder.

    Raises:
        ValueError: the folder has something in it and ``force`` isn't set.
    """
    with torch.device("meta"):
        model = MLPSpeculatorPreTrainedModel(config)
    state = {**tensors, **{alias: tensors[first] for alias, first in aliases.items()}}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    with _replacing(path, force) as temporary:
        temporary.mkdir()
        for file in source.files:
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / file, temporary / file)
        model.save_pretrained(temporary)
        written: set[str] = set()
        for shard in temporary.glob("*.safetensors"):
            with safe_open(shard, "pt") as opened:
                written |= set(opened.keys())
        _check_complete(set(tensors), written, path)


@contextmanager
def _replacing(path: Path, force: bool) -> Iterator[Path]:
    """A free name beside ``path``; what is written there takes its place when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        new, old = Path(folder) / "new", Path(folder) / "old"
        yield new
        if path.exists():
            if not force and not (path.is_dir() and not any(path.iterdir())):
                raise ValueError(
                    f"DEST={str(path)!r} appeared while it was written; nothing is lost"
                )
            os.replace(path, old)
        try:
            os.replace(new, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise


def _compact(tensor: Tensor) -> Tensor:
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def _check_complete(expected: set[str], written: set[str], path: Path) -> None:
    if expected != written:
        raise RuntimeError(
            f"{path} was not written: it would have lost {listed(sorted(expected - written))} and "
            f"gained {listed(sorted(written - expected))}"
        )
