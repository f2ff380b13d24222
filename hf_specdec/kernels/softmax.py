"""Maximum and sum of the softmax of every row of logits, read once, without writing it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_specdec.kernels.rows import (
    TRITON_TYPES,
    Split,
    on_device_of,
    scaled,
    signature,
    split,
)
from hf_specdec.kernels.variants import Variant

_LOWEST = tl.constexpr(float("-inf"))

_BLOCK = 4096
_WARPS = 8


@triton.jit(do_not_specialize=["num_positions", "num_chunks", "chunk_blocks"])
def statistics_partial(
    logits,
    statistics,
    temperature,
    vocabulary,
    logits_stride_row,
    logits_stride_position,
    num_positions,
    num_chunks,
    chunk_blocks,
    SCALE: tl.constexpr,
    ON_GPU: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (B * Q, chunks): largest logit and sum of exp(logit - largest) of one chunk.

    A lane reads ``WIDTH`` neighbours, what one thread loads at once, so that only every
    ``WIDTH``-th logit costs a second exponential.
    """
    row = (tl.program_id(0) // num_positions).to(tl.int64)
    position = (tl.program_id(0) % num_positions).to(tl.int64)
    chunk = tl.program_id(1)
    base = logits + row * logits_stride_row + position * logits_stride_position
    start = chunk * (chunk_blocks * LANES * WIDTH)
    end = tl.minimum(start + chunk_blocks * LANES * WIDTH, vocabulary)
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    largest = tl.full([LANES], _LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for block_start in range(start, end, LANES * WIDTH):
        ids = block_start + lane
        x = tl.load(base + ids, mask=ids < end, other=_LOWEST).to(tl.float32)
        x = scaled(x, temperature, SCALE, not ON_GPU)
        grown = tl.maximum(largest, tl.max(x, 1))
        # Nothing but -inf so far: exp(-inf - -inf) would be NaN.
        shift = tl.where(grown == _LOWEST, 0.0, grown)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        largest = grown
    chunk_largest = tl.max(largest, 0)
    chunk_shift = tl.where(chunk_largest == _LOWEST, 0.0, chunk_largest)
    at = tl.program_id(0).to(tl.int64) * num_chunks + chunk
    tl.store(statistics + at, chunk_largest)
    at += tl.num_programs(0).to(tl.int64) * num_chunks
    tl.store(statistics + at, tl.sum(total * tl.exp(largest - chunk_shift), 0))


def softmax_statistics(
    logits: torch.Tensor, temperature: float | None
) -> tuple[torch.Tensor, Split]:
    """Largest logit and sum of exp(logit - largest), chunk by chunk.

    Args:
        logits: ``[B, Q, V]`` in float32, bfloat16 or float16, rows dense.
        temperature: divides the logits.

    Returns:
        float32 ``[2, B * Q, chunks]``, maxima and sums, and how the rows were split.
    """
    requests, num_positions, vocabulary = logits.shape
    width = 16 // logits.element_size()
    plan = split(vocabulary, requests, num_positions, _BLOCK, logits.device)
    rows = requests * num_positions
    shape = (2, rows, plan.chunks)
    statistics = torch.empty(shape, dtype=torch.float32, device=logits.device)
    with on_device_of(logits):
        statistics_partial[(rows, plan.chunks)](
            logits,
            statistics,
            1.0 if temperature is None else float(temperature),
            vocabulary,
            *logits.stride()[:2],
            num_positions,
            plan.chunks,
            plan.blocks,
            SCALE=temperature is not None,
            ON_GPU=logits.is_cuda,
            LANES=_BLOCK // width,
            WIDTH=width,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # torch rounds after the division
        )
    return statistics, plan


def variants() -> list[Variant]:
    """The kernel of this file in every dtype."""
    return [_variant(name, 16 // dtype.itemsize) for dtype, name in TRITON_TYPES.items()]


def _variant(dtype: str, width: int) -> Variant:
    types = {"logits": f"*{dtype}", "statistics": "*fp32", "temperature": "fp32"}
    modes: dict[str, Any] = {"SCALE": True, "ON_GPU": True}
    modes |= {"LANES": _BLOCK // width, "WIDTH": width}
    return Variant(
        name=f"statistics_partial {dtype}",
        kernel=statistics_partial,
        signature=signature(statistics_partial, types, modes),
        constexprs=modes,
        divisible_by_16=(
            *("logits", "statistics", "vocabulary"),
            *("logits_stride_row", "logits_stride_position"),
        ),
        num_warps=_WARPS,
        bytes_moved="B * Q * V * itemsize read, B * Q * chunks * 8 written",
        floor="B * K * V * itemsize, as a bonus row needs no statistics",
    )
