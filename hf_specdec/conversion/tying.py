"""Sharing a tensor between heads, and no longer sharing it.

Tied, head i uses the tensors of head 0 (projection i those of projection 1). Tying can lose
something, so it is done only where the tensors are equal to the last bit already.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_specdec.conversion.layout import listed


def check_equal(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Raise ValueError, naming the pairs, unless every alias equals what it stands for.

    Args:
        tensors: under the network's names.
        aliases: alias to the name of the tensor it stands for.
    """
    differ = [
        f"{alias} and {first}"
        for alias, first in aliases.items()
        if alias in tensors and first in tensors and not _equal(tensors[alias], tensors[first])
    ]
    if differ:
        raise ValueError(
            f"tie_weights: these tensors are not equal, so one can't stand for the other: "
            f"{listed(differ)}. Convert with --no-tie-weights"
        )


def are_equal(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> bool:
    """Whether every alias equals what it stands for."""
    return all(_equal(tensors[alias], tensors[first]) for alias, first in aliases.items())


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    same_storage = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    if same_storage and a.storage_offset() == b.storage_offset() and a.stride() == b.stride():
        return True
    # As bits: -0 is not 0, and NaN equals itself.
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
