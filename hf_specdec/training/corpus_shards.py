"""Whether a shard of a corpus can be what it claims; see `corpus` for its tensors.

Boundary: headers, and what is in memory anyway. States and top tokens stay in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from hf_specdec.modeling.checkpoint_headers import read_header

# Dtype and number of dimensions.
_STORED = {
    "tokens": ("I32", 1),
    "flag": ("I8", 1),
    "hidden": ("BF16", 2),
    "top_ids": ("I32", 2),
    "top_logprobs": ("BF16", 2),
    "offsets": ("I64", 1),
}


def check_shard(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError unless a shard holds these tensors, in their dtypes and number of rows.

    Args:
        path: of the shard.
        names: of its tensors; those of positions have a row for each token.
    """
    entries = read_header(path)
    rows = entries["tokens"].shape[:1] if "tokens" in entries else ()
    for name in names:
        dtype, dims = _STORED[name]
        if name not in entries:
            raise ValueError(f"{path} is damaged: it lacks {name}; remove it, or generate again")
        entry = entries[name]
        is_short = name != "offsets" and entry.shape[:1] != rows
        if entry.dtype != dtype or len(entry.shape) != dims or is_short:
            raise ValueError(
                f"{path} is damaged: {name} is {entry.dtype} {list(entry.shape)}, but it must be "
                f"{dtype} of {dims} dimension(s) with a row for each of {list(rows)} tokens"
            )


def check_positions(path: Path, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    """Raise ValueError for documents that aren't end to end, or ids that the target hasn't.

    Args:
        path: of the shard.
        tensors: ``tokens`` and ``offsets``.
        vocab_size: V of the target.
    """
    tokens, offsets = tensors["tokens"], tensors["offsets"]
    is_whole = len(offsets) and offsets[0] == 0 and offsets[-1] == len(tokens)
    if not is_whole or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{path} is damaged: its offsets don't lead from 0 to {len(tokens)} upwards"
        )
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(
            f"{path} is damaged: it has token ids of {int(tokens.min())} to {int(tokens.max())}, "
            f"the target's are 0 to {vocab_size - 1}"
        )
