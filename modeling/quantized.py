"""What a target's layers say of themselves, quantized or not.

Quantized layers keep their numbers in integers, in packed bytes of another shape, or in a tensor
subclass that shows the dtype and shape of what it stands for. So whoever wants to know how many ids
a head has, in which dtype a target computes, or whether a table can be read row by row, asks here.

Boundary: looks at modules and tensors, computes nothing and copies nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# In what torch multiplies on every device; 8-bit floats are storage.
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_plain(tensor: Tensor) -> bool:
    """Whether a weight is floating-point numbers in memory, which views and copies are made of."""
    return tensor.dtype in _COMPUTED and not is_traceable_wrapper_subclass(tensor)


def num_ids(layer: Any) -> int:
    """Ids that an input embedding or an output head knows; packed weights have other shapes."""
    for name in ("out_features", "num_embeddings"):
        size = getattr(layer, name, None)
        if isinstance(size, int):
            return size
    return int(layer.weight.shape[0])


def compute_dtype(target: Any) -> torch.dtype:
    """The dtype of a target's hidden states, that of its embedding unless it is packed."""
    dtype: torch.dtype = target.get_input_embeddings().weight.dtype
    # Else that of the first weight in floating point: norms are never quantized.
    return dtype if dtype in _COMPUTED else target.dtype


def stored_parts(weight: Tensor) -> list[Tensor]:
    """The tensors in memory that a weight is made of: itself, unless it is a subclass of others."""
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    wrapper: Any = weight
    names, _ = wrapper.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(wrapper, name))]
