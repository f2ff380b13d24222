"""Weights of a target that is cut over several ranks, put together for a drafter to read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Where a weight keeps its whole copy.
_KEPT = "_hf_specdec_whole"


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight as it is on every rank that needs all of it: itself, unless it is cut.

    All ranks that hold a part have to call this. They gather the parts once, and again only when
    the weight has been written to.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return weight
    from torch.distributed.tensor import DTensor

    if not isinstance(weight, DTensor):
        return weight
    version = weight.to_local()._version
    kept: Any = getattr(weight, _KEPT, None)
    if kept is None or kept[0] != version:
        with torch.no_grad():
            kept = version, weight.full_tensor()
        setattr(weight, _KEPT, kept)
    return kept[1]
