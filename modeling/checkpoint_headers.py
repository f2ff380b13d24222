"""What the files of a checkpoint say they hold, checked before anybody relies on it.

A file may be cut off, damaged, or made to mislead: a header that is longer than its file, tensors
that overlap or lie outside, an index that names files of other folders. Whatever is wrong is a
``ValueError`` that names the file and the entry; no memory is taken for what a header only claims.

Boundary: names, shapes and dtypes of files on this machine. No tensor's data is read, and what the
names mean is for others to say.
"""

import json
import math
import pickle
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WEIGHT_SUFFIXES = (".safetensors", ".bin")
FLOAT_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
"""Dtypes that a network computes in, in safetensors' words."""

# The format's own limit.
_LONGEST_HEADER = 100_000_000
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BITS |= dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8)
BITS |= dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
BITS |= dict.fromkeys(("I32", "U32", "F32"), 32)
BITS |= dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
"""Bits of an element, by its dtype in safetensors' words."""
_TORCH_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_LONGEST_NAME = 80
_MOST_DIMS = 64


@dataclass(frozen=True)
class StoredTensor:
    """An entry of a checkpoint.

    Attributes:
        dtype: in safetensors' words, such as ``"BF16"``; in torch's where those have none.
        shape: of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file; 0 for a dtype that safetensors doesn't have."""
        return (math.prod(self.shape) * BITS.get(self.dtype, 0) + 7) // 8


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: something else, or nothing that can be read; the file is named.
    """
    try:
        content = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError(f"{file} can't be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file} can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, it must be a JSON object")
    return content


def read_index(file: Path) -> dict[str, str]:
    """The ``weight_map`` of an index: which file of the same folder holds which tensor.

    Raises:
        ValueError: no such map, or a name that is no weights file's or leads to another folder.
    """
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file} has no weight_map, an object from tensors to files' names")
    for tensor, shard in weight_map.items():
        # A name with a folder in it could lead out of the checkpoint; Windows splits at \ and :.
        if (
            not isinstance(shard, str)
            or any(c in shard for c in "/\\:\0")
            or not shard.endswith(WEIGHT_SUFFIXES)
        ):
            raise ValueError(
                f"{file} names {shown(shard)} as the file of {shown(tensor)}; it must be the name "
                "of a .safetensors or .bin file in the same folder"
            )
    return weight_map


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The entries of a safetensors file, from its first bytes and its size.

    Raises:
        ValueError: not such a file, or one whose header contradicts itself or the file's size.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _LONGEST_HEADER:
            raise ValueError(f"{file} is not a safetensors file: it has no header")
        if length > size - 8:
            raise ValueError(
                f"{file} is not a safetensors file, or cut off: its header should have {length} "
                f"bytes, the file has {size}"
            )
        try:
            header = json.loads(stream.read(length), object_pairs_hook=_without_twins)
        except _TwiceError as error:
            raise ValueError(f"{file} is damaged: its header has {error} twice") from None
        except (ValueError, RecursionError):
            raise ValueError(f"{file} is not a safetensors file: its header isn't JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not a safetensors file: its header is no JSON object")
    return _checked_entries(file, header, size - 8 - length)


def read_pickle(file: Path) -> dict[str, StoredTensor]:
    """The entries of a ``.bin`` file, which is unpickled without running any code in it.

    Raises:
        ValueError: it holds anything but tensors, or can't be read.
    """
    state = load_pickle(file)
    wrong = [
        key
        for key, value in state.items()
        if not isinstance(key, str) or not isinstance(value, torch.Tensor)
    ]
    if wrong:
        raise ValueError(
            f"{file}: {shown(wrong[0])} is no tensor; a checkpoint maps names to tensors"
        )
    return {
        name: StoredTensor(_TORCH_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape))
        for name, t in state.items()
    }


def load_pickle(file: Path, mmap: bool = True) -> dict[Any, Any]:
    """The dict in a ``.bin`` file.

    Args:
        file: it.
        mmap: leave the tensors in the file where its format allows that.

    Raises:
        ValueError: it holds something else, code above all, or can't be read.
    """
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except RuntimeError as error:
            # Files of before torch 1.6 can't be mapped.
            if "mmap" not in str(error):
                raise
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is no pickle of tensors alone, and reading anything else would run code from "
            f"it: {asked_for(error)}"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{file} can't be read as a torch checkpoint: {_first_line(error)}"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} holds a {type(content).__name__}; a checkpoint maps names to tensors"
        )
    return content


def read_entries(file: Path) -> dict[str, StoredTensor]:
    """The entries of a weights file of either kind; see `read_header` and `read_pickle`."""
    return read_header(file) if file.name.endswith(".safetensors") else read_pickle(file)


def check_holds(
    file: Path, entries: Mapping[str, StoredTensor], index: Path, names: list[str]
) -> None:
    """Raise ValueError unless a shard holds what its index says."""
    if lacking := [name for name in names if name not in entries]:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ValueError(f"{index} names {file.name} for {shown(lacking[0])}{more}, not in there")


def check_stored_dtypes(
    source: object, entries: Mapping[str, StoredTensor], is_ids: Callable[[str], bool]
) -> None:
    """Refuse weights that were quantized, or that are no weights.

    Args:
        source: of the checkpoint, for the message.
        entries: to look at.
        is_ids: whether a name is that of a table of ids, which are int64.

    Raises:
        ValueError: naming some of them, with their dtypes.
    """
    wrong = [
        f"{name} ({entry.dtype})"
        for name, entry in sorted(entries.items())
        if (entry.dtype != "I64" if is_ids(name) else entry.dtype not in FLOAT_DTYPES)
    ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"{str(source)!r} holds weights of a dtype that this network can't be run in: "
            f"{', '.join(wrong[:8])}{more}. Weights are {', '.join(sorted(FLOAT_DTYPES))}, ids "
            "I64; store them so, or quantize while loading (quantization_config=...)"
        )


def check_stored_shapes(
    source: object, entries: Mapping[str, StoredTensor], network: torch.nn.Module
) -> None:
    """Refuse weights of another shape than the network's, before memory is taken for those.

    Args:
        source: of the checkpoint, for the message.
        entries: of its files; names that the network doesn't have are left to others.
        network: without weights.

    Raises:
        ValueError: naming some of them, with both shapes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    wrong = [
        f"{name} (checkpoint {list(entry.shape)}, network {list(shapes[name])})"
        for name, entry in sorted(entries.items())
        if shapes.get(name, entry.shape) != entry.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"the weights of {str(source)!r} do not fit its config.\n  of the wrong shape: "
            f"{', '.join(wrong[:8])}{more}\nCorrect the config, or download the checkpoint again"
        )


def shown(value: Any) -> str:
    """A value in a message, cut off where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


class _TwiceError(Exception):
    """A key that an object has twice."""


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise _TwiceError(shown(Counter(key for key, _ in pairs).most_common(1)[0][0]))
    return result


def _checked_entries(file: Path, header: dict[str, Any], size: int) -> dict[str, StoredTensor]:
    """Entries of a header for ``size`` bytes of data, which they must fill without a gap."""
    entries, spans = {}, []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        entry, span = _checked_entry(file, name, fields)
        if span[1] > size:
            raise ValueError(
                f"{file} is damaged or cut off: {shown(name)} ends at byte {span[1]} of {size}"
            )
        entries[name] = entry
        spans.append((*span, name))
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            what = "overlaps another tensor" if first < end else "has a gap before it"
            raise ValueError(f"{file} is damaged: {shown(name)} {what} at byte {first}")
        end = last
    if end != size:
        raise ValueError(f"{file} is damaged: its tensors end at byte {end} of {size}")
    return entries


def _checked_entry(file: Path, name: str, fields: Any) -> tuple[StoredTensor, tuple[int, int]]:
    def wrong(what: str) -> ValueError:
        return ValueError(f"{file} is damaged: {shown(name)} has {what}")

    if not isinstance(fields, dict):
        raise wrong(f"{shown(fields)} in place of dtype, shape and data_offsets")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise wrong(f"dtype {shown(dtype)}, which isn't one of safetensors")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(map(_is_size, shape)):
        raise wrong(f"shape {shown(shape)}, it must be a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise wrong(f"data_offsets {shown(offsets)}, it must be two places in the file")
    entry, (first, last) = StoredTensor(dtype, tuple(shape)), offsets
    if last - first != entry.num_bytes:
        raise wrong(
            f"dtype {dtype} and shape {shown(shape)}, which are {shown(entry.num_bytes)} bytes, "
            f"but data_offsets {shown(offsets)}"
        )
    return entry, (first, last)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def asked_for(error: pickle.UnpicklingError) -> str:
    """What a pickle wanted; torch's own words go on to say how to run it nevertheless."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"it asks for {shown(found[1])}" if found else "it holds more than plain data"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
