"""What the verification kernels share: how a row of logits is split, read, and its best found."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

NONE = tl.constexpr(2147483647)  # an index behind every other
_LOWEST = tl.constexpr(float("-inf"))

# Programs that can share one row, at most: what a finishing kernel combines in one tile.
MOST_CHUNKS = 64
_LARGEST_TILE = 1024
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def scaled(logits, temperature, SCALE: tl.constexpr, DIVIDE: tl.constexpr):
    """float32 logits over the temperature, rounded as torch rounds ``logits / temperature``.

    torch divides on CPU (``DIVIDE``); on CUDA it multiplies by the reciprocal of a Python number.
    """
    if SCALE:
        if DIVIDE:
            return tl.div_rn(logits, temperature)
        else:
            return logits * tl.div_rn(1.0, temperature)
    else:
        return logits


@triton.jit
def improves(values, best):
    """Where values replace the best so far: larger ones, and the first NaN, as torch orders."""
    return (values > best) | ((values != values) & (best == best))


@triton.jit
def best_of(values, indices, AXIS: tl.constexpr):
    """The largest value along an axis and the lowest index that holds it; NaN is the largest.

    Whether ``tl.max`` sees a NaN differs between versions, so none is shown to it.
    """
    is_nan = values != values
    any_nan = tl.max(is_nan.to(tl.int32), AXIS, keep_dims=True) > 0
    largest = tl.max(tl.where(is_nan, _LOWEST, values), AXIS, keep_dims=True)
    holds = tl.where(any_nan, is_nan, values == largest)
    index = tl.min(tl.where(holds, indices, NONE), AXIS)
    return tl.max(largest, AXIS), tl.max(any_nan.to(tl.int32), AXIS) > 0, index


@triton.jit
def store_best(values, indices, offset, best, best_ids):
    """Write the best of a chunk; both blocks are one-dimensional."""
    largest, any_nan, index = best_of(best, best_ids, 0)
    tl.store(values + offset, tl.where(any_nan, float("nan"), largest))
    tl.store(indices + offset, index)


@dataclass(frozen=True)
class Split:
    """How rows are shared out: ``chunks`` programs a row, each reads ``blocks`` blocks.

    Attributes:
        chunks: programs a row.
        blocks: blocks of a chunk. (Kernels multiply by the block themselves: only so does the
            compiler know that a chunk starts where 16 bytes can be loaded at once.)
        positions_padded: positions of a request, up to a power of two.
        chunks_padded: the width of the finishing kernel's tile. A function of the positions alone,
            so that another batch size is no new compilation.
    """

    chunks: int
    blocks: int
    positions_padded: int
    chunks_padded: int


def split(
    vocabulary: int, requests: int, positions: int, block: int, device: torch.device
) -> Split:
    """Share ``requests * positions`` rows of logits out so that the device is filled."""
    positions_padded = triton.next_power_of_2(positions)
    most = max(1, min(MOST_CHUNKS, _LARGEST_TILE // positions_padded))
    blocks = triton.cdiv(vocabulary, block)
    wanted = program_slots(device) // max(1, requests * positions)
    per_chunk = triton.cdiv(blocks, max(1, min(blocks, most, wanted)))
    return Split(triton.cdiv(blocks, per_chunk), per_chunk, positions_padded, most)


@cache
def program_slots(device: torch.device) -> int:
    """Programs that occupy the device: two a multiprocessor; few where each costs time."""
    if device.type != "cuda":
        return 16
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def signature(kernel: Any, types: dict[str, str], constexprs: dict[str, Any]) -> dict[str, str]:
    """Triton's types of a kernel's arguments: the named ones, ``i32`` for all other integers."""
    rest = (name for name in kernel.arg_names if name not in constexprs)
    return {name: types.get(name, "i32") for name in rest}
