"""Verification by matching, in one pass over the logits: the twin of `verification.verify_match`.

Two launches without atomics. The first splits every row of logits over several programs, each of
which finds the best token of its chunk, noise and temperature included; the second combines the
chunks of a request, compares with the draft and writes what is emitted. Nothing is read on the
host, and no float32 copy of the logits is made.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_specdec.kernels.noise import gumbel, hash_keys
from hf_specdec.kernels.rows import (
    MOST_CHUNKS,
    NONE,
    TRITON_TYPES,
    best_of,
    improves,
    on_device_of,
    scaled,
    signature,
    split,
    store_best,
)
from hf_specdec.kernels.variants import Variant
from hf_specdec.noise import Stream

_LOWEST = tl.constexpr(float("-inf"))
_TOKEN = tl.constexpr(int(Stream.TOKEN))

_BLOCK = 4096
_NOISY_BLOCK = 2048  # more registers an id
_WARPS = 8
_FINISH_WARPS = 4


@triton.jit(do_not_specialize=["num_positions", "num_chunks", "chunk_blocks"])
def match_partial(
    logits,
    row_seeds,
    positions,
    values,
    indices,
    temperature,
    vocabulary,
    logits_stride_row,
    logits_stride_position,
    num_positions,
    num_chunks,
    chunk_blocks,
    NOISE: tl.constexpr,
    SCALE: tl.constexpr,
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * Q, chunks): the best token of one chunk of one row of logits."""
    row = (tl.program_id(0) // num_positions).to(tl.int64)
    position = (tl.program_id(0) % num_positions).to(tl.int64)
    chunk = tl.program_id(1)
    base = logits + row * logits_stride_row + position * logits_stride_position
    if NOISE:
        place = tl.load(positions + tl.program_id(0))
        first, second = hash_keys(tl.load(row_seeds + row), place, _TOKEN)
    start = chunk * (chunk_blocks * BLOCK)
    end = tl.minimum(start + chunk_blocks * BLOCK, vocabulary)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], _LOWEST, tl.float32)
    best_ids = start + lane
    # Each lane keeps its own best, and the lanes are compared once, at the end.
    for block_start in range(start, end, BLOCK):
        ids = block_start + lane
        x = tl.load(base + ids, mask=ids < end, other=_LOWEST).to(tl.float32)
        x = scaled(x, temperature, SCALE, not ON_GPU)
        if NOISE:
            x = x + gumbel(first, second, ids, ON_GPU)
        better = improves(x, best)
        best = tl.where(better, x, best)
        best_ids = tl.where(better, ids, best_ids)
    store_best(values, indices, tl.program_id(0).to(tl.int64) * num_chunks + chunk, best, best_ids)


@triton.jit(do_not_specialize=["num_positions", "num_draft_tokens", "num_chunks"])
def match_finish(
    values,
    indices,
    draft_ids,
    tokens,
    num_accepted,
    num_positions,
    num_draft_tokens,
    num_chunks,
    POSITIONS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (B,): the chosen tokens of one request, and how many of its drafts they equal."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, POSITIONS)
    chunk = tl.arange(0, CHUNKS)
    at = (row * num_positions + position[:, None]) * num_chunks + chunk[None, :]
    inside = (position[:, None] < num_positions) & (chunk[None, :] < num_chunks)
    best = tl.load(values + at, mask=inside, other=_LOWEST)
    best_ids = tl.load(indices + at, mask=inside, other=NONE)
    _, _, chosen = best_of(best, best_ids, 1)
    chosen = chosen.to(tl.int64)
    draft_at = draft_ids + row * num_draft_tokens + position
    drafted = tl.load(draft_at, mask=position < num_draft_tokens, other=-1)
    wrong = (drafted != chosen) & (position < num_draft_tokens)
    accepted = tl.min(tl.where(wrong, position, num_draft_tokens), 0)
    out = tokens + row * num_positions + position
    tl.store(out, chosen, mask=position < num_positions)
    tl.store(num_accepted + row, accepted.to(tl.int64))


def verify_match(
    draft_ids: torch.Tensor,
    logits: torch.Tensor,
    row_seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts while they equal the target's own choice.

    Args:
        draft_ids: int64 ``[B, K]``.
        logits: ``[B, K + 1, V]`` in float32, bfloat16 or float16; rows dense, other strides free.
        row_seeds: int64 ``[B]``, or ``None`` for greedy decoding.
        positions: int64 ``[B, K + 1]``, needed with ``row_seeds``.
        temperature: divides the logits.

    Returns:
        int64 ``[B, K + 1]``, the choices, and int64 ``[B]``, the accepted draft tokens.
    """
    requests, num_positions, vocabulary = logits.shape
    device = logits.device
    noisy = row_seeds is not None
    block = _NOISY_BLOCK if noisy else _BLOCK
    plan = split(vocabulary, requests, num_positions, block, device)
    rows = requests * num_positions
    values = torch.empty((rows, plan.chunks), dtype=torch.float32, device=device)
    indices = torch.empty((rows, plan.chunks), dtype=torch.int32, device=device)
    tokens = torch.empty((requests, num_positions), dtype=torch.long, device=device)
    num_accepted = torch.empty(requests, dtype=torch.long, device=device)
    with on_device_of(logits):
        match_partial[(rows, plan.chunks)](
            logits,
            row_seeds.contiguous() if row_seeds is not None else None,
            positions.contiguous() if noisy and positions is not None else None,
            values,
            indices,
            1.0 if temperature is None else float(temperature),
            vocabulary,
            logits.stride(0),
            logits.stride(1),
            num_positions,
            plan.chunks,
            plan.blocks,
            NOISE=noisy,
            SCALE=temperature is not None,
            ON_GPU=logits.is_cuda,
            BLOCK=block,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # torch rounds after the product and after the sum
        )
        match_finish[(requests,)](
            *(values, indices, draft_ids.contiguous(), tokens, num_accepted),
            *(num_positions, draft_ids.shape[1], plan.chunks),
            POSITIONS=plan.positions_padded,
            CHUNKS=plan.chunks_padded,
            num_warps=_FINISH_WARPS,
        )
    return tokens, num_accepted


def variants() -> list[Variant]:
    """The kernels of this file as they are launched for Q = 5 positions."""
    finish: dict[str, Any] = {"POSITIONS": 8, "CHUNKS": MOST_CHUNKS}
    pointers = {"draft_ids": "*i64", "tokens": "*i64", "num_accepted": "*i64"} | _CHUNK_POINTERS
    return [
        *(_partial_variant(dtype, noise=False, scale=False) for dtype in TRITON_TYPES.values()),
        *(_partial_variant(dtype, noise=True, scale=True) for dtype in TRITON_TYPES.values()),
        _partial_variant("fp32", noise=True, scale=False),  # behind top-k and other filters
        Variant(
            name="match_finish",
            kernel=match_finish,
            signature=signature(match_finish, pointers, finish),
            constexprs=finish,
            divisible_by_16=tuple(pointers),
            num_warps=_FINISH_WARPS,
            bytes_moved="B * Q * chunks * 8 read, B * Q * 16 for drafts and tokens",
            floor="B * Q * 16",
        ),
    ]


_CHUNK_POINTERS = {"values": "*fp32", "indices": "*i32"}


def _partial_variant(dtype: str, noise: bool, scale: bool) -> Variant:
    block = _NOISY_BLOCK if noise else _BLOCK
    constexprs: dict[str, Any] = {"NOISE": noise, "SCALE": scale, "ON_GPU": True, "BLOCK": block}
    pointers = {"logits": f"*{dtype}", **_CHUNK_POINTERS}
    if noise:
        pointers |= {"row_seeds": "*i64", "positions": "*i64"}
    else:
        constexprs |= {"row_seeds": None, "positions": None}
    return Variant(
        name=f"match_partial {dtype}{' noise' * noise}{' temperature' * scale}",
        kernel=match_partial,
        signature=signature(match_partial, pointers | {"temperature": "fp32"}, constexprs),
        constexprs=constexprs,
        divisible_by_16=(
            *pointers,
            *("vocabulary", "logits_stride_row", "logits_stride_position"),
        ),
        num_warps=_WARPS,
        bytes_moved="B * Q * V * itemsize read once, B * Q * chunks * 8 written",
        floor="B * Q * V * itemsize",
    )
