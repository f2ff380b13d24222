"""Which files a checkpoint's weights are in, and whether they can be what they claim.

Boundary: files of a folder, of a Hub repository or of its cache, found as transformers finds them.
What is in them is `checkpoint_headers`' business.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from hf_specdec.modeling.checkpoint_headers import (
    StoredTensor,
    check_holds,
    read_entries,
    read_index,
    shown,
)

HUB_ARGUMENTS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip
"""Arguments of ``from_pretrained`` that say where files are."""
# In this order transformers looks for weights.
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class WeightsFiles:
    """Weights as the files' headers describe them.

    Attributes:
        entries: name to dtype and shape.
        num_bytes: size of the files.
    """

    entries: dict[str, StoredTensor]
    num_bytes: int


def find(source: Any, name: str, **hub: Any) -> Path | None:
    """A file of a checkpoint on this machine, downloaded if need be; ``None`` if there is none.

    Args:
        source: folder or Hub id.
        name: of the file.
        **hub: of `HUB_ARGUMENTS`.
    """
    try:
        found = cached_file(source, name, **hub)
    except OSError:
        return None
    return None if found is None else Path(found)


def find_shards(
    source: Any, index: Path, weight_map: Mapping[str, str], **hub: Any
) -> dict[Path, list[str]]:
    """The files that an index names, each with what it should hold.

    Raises:
        ValueError: one isn't there.
    """
    names: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        names.setdefault(shard, []).append(tensor)
    found: dict[Path, list[str]] = {}
    for shard, tensors in sorted(names.items()):
        file = find(source, shard, **hub)
        if file is None:
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            raise ValueError(
                f"{str(source)!r} lacks {shard}, which {index.name} names for {shown(tensors[0])}"
                f"{more}; download the checkpoint again"
            )
        found[file] = tensors
    return found


def read_weights_files(source: Any, **kwargs: Any) -> WeightsFiles | None:
    """What the weights files hold that ``from_pretrained(source, **kwargs)`` would read.

    Args:
        source: folder or Hub id.
        **kwargs: of ``from_pretrained``; others than those about files don't matter.

    Returns:
        ``None`` where there are none, or they are of a kind that only transformers knows.

    Raises:
        ValueError: a file that is cut off, damaged, missing, or in another folder.
    """
    if not isinstance(source, (str, os.PathLike)) or kwargs.get("gguf_file"):
        return None
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
    index = weights = None
    for name in _names(kwargs.get("use_safetensors"), kwargs.get("variant")):
        weights = find(source, name, **hub)
        if weights is not None:
            break
    if weights is None:
        return None
    files: dict[Path, list[str]] = {weights: []}
    if weights.suffix == ".json":
        index, files = weights, find_shards(source, weights, read_index(weights), **hub)
    entries: dict[str, StoredTensor] = {}
    for file, names in files.items():
        here = read_entries(file)
        if index is not None:
            check_holds(file, here, index, names)
        entries |= here
    return WeightsFiles(entries, sum(file.stat().st_size for file in files))


def _names(use_safetensors: bool | None, variant: str | None) -> list[str]:
    names = [] if use_safetensors is False else list(_SAFETENSORS)
    names += [] if use_safetensors else _PICKLES
    if not variant:
        return names
    # model.fp16.safetensors, model.safetensors.index.fp16.json
    parts = [name.rpartition(".") for name in names]
    return [f"{stem}.{variant}.{suffix}" for stem, _, suffix in parts]
