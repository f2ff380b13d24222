"""What a checkpoint holds, from its headers: names, shapes and dtypes, and not one weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
)

from hf_specdec.modeling.checkpoint_headers import BITS, read_header, read_index

INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")
_NO_PARAMETERS = {"BOOL", "I64", "U64"}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        name: its key.
        shape: of the tensor.
        dtype: in safetensors' words, such as ``"BF16"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Entries."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_elements * BITS.get(self.dtype, 32) // 8

    @property
    def is_float(self) -> bool:
        """Whether a dtype for the model is the tensor's, too; ids and masks keep their own."""
        return self.dtype.startswith(("F", "BF"))


@dataclass(frozen=True)
class Headers:
    """Headers of all files of a checkpoint.

    Attributes:
        tensors: of its safetensors files; empty without any.
        pickled_bytes: size of its pickled files where there are no others. A pickle has no header:
            to know what is in it, it has to be run, which isn't done.
    """

    tensors: tuple[Tensor, ...] = ()
    pickled_bytes: int = 0

    def where(self, wanted: Callable[[str], bool]) -> Headers:
        """Only the tensors whose names are wanted."""
        return Headers(tuple(t for t in self.tensors if wanted(t.name)))

    @property
    def num_parameters(self) -> int:
        """Entries of all tensors; tables of ids and masks aren't parameters."""
        return sum(t.num_elements for t in self.tensors if t.dtype not in _NO_PARAMETERS)

    def num_bytes(self, itemsize: int | None = None) -> int:
        """Bytes of all tensors.

        Args:
            itemsize: bytes of one entry, for tensors of floats; ``None``: as stored.
        """
        return sum(
            t.num_elements * itemsize if itemsize and t.is_float else t.num_bytes
            for t in self.tensors
        )

    @property
    def dtypes(self) -> list[str]:
        """Dtypes in the files, the one of most entries first."""
        count: dict[str, int] = {}
        for tensor in self.tensors:
            count[tensor.dtype] = count.get(tensor.dtype, 0) + tensor.num_elements
        return sorted(count, key=lambda dtype: -count[dtype])


def read_headers(name: str, revision: str | None = None) -> Headers:
    """The headers of a folder, of a Hub repository in the cache, or of one on the Hub.

    On the Hub the headers alone are downloaded.

    Args:
        name: folder or Hub id.
        revision: of the repository.

    Raises:
        ValueError: a file that is damaged or cut off, or an index that names what isn't there.
    """
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError):
            return _on_the_hub(name, revision)
        if not any(folder.glob("*.safetensors")):
            return _on_the_hub(name, revision)
    tensors = tuple(
        Tensor(key, entry.shape, entry.dtype)
        for file in _files(folder)
        for key, entry in read_header(file).items()
    )
    if tensors:
        return Headers(tensors)
    pickled = {file for pattern in PICKLED for file in folder.glob(pattern)}
    return Headers(pickled_bytes=sum(file.stat().st_size for file in pickled))


def _files(folder: Path) -> list[Path]:
    """The safetensors files that belong to the checkpoint.

    Raises:
        ValueError: one that its index names isn't there, or is in another folder.
    """
    index = folder / INDEX
    if index.exists():
        shards = set(read_index(index).values())
        if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
            raise ValueError(f"{index} names {missing[0]}, which isn't there; download it again")
        return sorted(folder / shard for shard in shards)
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def _on_the_hub(name: str, revision: str | None) -> Headers:
    try:
        metadata = get_safetensors_metadata(name, revision=revision)
    except (NotASafetensorsRepoError, HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return Headers()
    return Headers(
        tuple(
            Tensor(key, tuple(info.shape), info.dtype)
            for file in metadata.files_metadata.values()
            for key, info in file.tensors.items()
        )
    )
