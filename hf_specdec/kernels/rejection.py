"""Verification by rejection, in two passes over the logits: the twin of `verify_rejection`.

Three launches without atomics. The first finds maximum and sum of the softmax of every row of
logits, chunk by chunk. The second decides, from these and K gathered logits, how many drafts are
accepted, and samples from the residual of the one row that matters; every program of a request
repeats the decision, which is tiny. The third combines its chunks. Probabilities of all tokens are
never written, and of the draft's probabilities only the row that was rejected is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_specdec.kernels.noise import gumbel, hash_keys, unit_interval
from hf_specdec.kernels.rows import (
    MOST_CHUNKS,
    NONE,
    TRITON_TYPES,
    best_of,
    on_device_of,
    scaled,
    signature,
    split,
    store_best,
)
from hf_specdec.kernels.softmax import softmax_statistics
from hf_specdec.kernels.variants import Variant
from hf_specdec.noise import Stream

_LOWEST = tl.constexpr(float("-inf"))
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))

_BLOCK = 2048
_WARPS = 8
_FINISH_WARPS = 1


@triton.jit
def _decide(
    logits,
    draft_ids,
    draft_probs,
    row_seed,
    positions,
    maxima,
    sums,
    temperature,
    vocabulary,
    logits_stride_position,
    probs_stride_position,
    num_positions,
    num_chunks,
    SCALE: tl.constexpr,
    ON_GPU: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """How many drafts of one request are accepted, and the softmax statistics of the row behind.

    All pointers are the request's own. Strict: a token of probability zero is never accepted.
    """
    position = tl.arange(0, POSITIONS)
    wide = position.to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    at = position[:, None] * num_chunks + chunk[None, :]
    inside = (position[:, None] < num_positions) & (chunk[None, :] < num_chunks)
    chunk_maxima = tl.load(maxima + at, mask=inside, other=_LOWEST)
    chunk_sums = tl.load(sums + at, mask=inside, other=0.0)
    largest = tl.max(chunk_maxima, 1)
    largest = tl.where(largest == _LOWEST, 0.0, largest)
    total = tl.sum(chunk_sums * tl.exp(chunk_maxima - largest[:, None]), 1)

    is_draft = position < num_positions - 1
    drafted = tl.load(draft_ids + position, mask=is_draft, other=-1)
    known = is_draft & (drafted >= 0) & (drafted < vocabulary)
    logit_at = logits + wide * logits_stride_position + drafted
    x = tl.load(logit_at, mask=known, other=_LOWEST).to(tl.float32)
    x = scaled(x, temperature, SCALE, not ON_GPU)
    target = tl.exp(x - largest) / tl.where(total > 0.0, total, 1.0)
    prob_at = draft_probs + wide * probs_stride_position + drafted
    draft = tl.load(prob_at, mask=known, other=0.0)
    at_position = tl.load(positions + position, mask=is_draft, other=0)
    seeds = row_seed + tl.zeros([POSITIONS], tl.int64)
    first, second = hash_keys(seeds, at_position, _ACCEPT)
    u = unit_interval(first, second, tl.zeros([POSITIONS], tl.int32))
    # A row that is all -inf, or holds +inf or NaN, has no distribution: the twin accepts nothing.
    accepts = known & (total > 0.0) & (u * draft < target)
    refused = is_draft & (accepts == 0)
    num_accepted = tl.min(tl.where(refused, position, num_positions - 1), 0)
    here = position == num_accepted
    return (
        num_accepted,
        tl.sum(tl.where(here, largest, 0.0), 0),
        tl.sum(tl.where(here, total, 0.0), 0),
    )


@triton.jit
def _race(
    logits,
    draft_probs,
    row_seed,
    position,
    largest,
    total,
    temperature,
    start,
    end,
    probs_end,
    SCALE: tl.constexpr,
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each lane's best token of start..end in the residual, and in the target's own row."""
    first, second = hash_keys(row_seed, position, _RESIDUAL)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], _LOWEST, tl.float32)
    best_ids = start + lane
    target_best = tl.full([BLOCK], _LOWEST, tl.float32)
    target_best_ids = start + lane
    for block_start in range(start, end, BLOCK):
        ids = block_start + lane
        x = tl.load(logits + ids, mask=ids < end, other=_LOWEST).to(tl.float32)
        x = scaled(x, temperature, SCALE, not ON_GPU) - largest
        draft = tl.load(draft_probs + ids, mask=ids < probs_end, other=0.0)
        residual = tl.exp(x) / total - draft
        noise = gumbel(first, second, ids, ON_GPU)
        left = residual > 0.0
        key = tl.where(left, tl.log(tl.where(left, residual, 1.0)) + noise, _LOWEST)
        better = key > best
        best = tl.where(better, key, best)
        best_ids = tl.where(better, ids, best_ids)
        target_key = x + noise
        target_better = target_key > target_best
        target_best = tl.where(target_better, target_key, target_best)
        target_best_ids = tl.where(target_better, ids, target_best_ids)
    return best, best_ids, target_best, target_best_ids


@triton.jit(do_not_specialize=["num_positions", "num_statistics", "num_chunks", "chunk_blocks"])
def sample_residual(
    logits,
    draft_ids,
    draft_probs,
    row_seeds,
    positions,
    statistics,
    num_accepted,
    values,
    indices,
    temperature,
    vocabulary,
    logits_stride_row,
    logits_stride_position,
    probs_stride_row,
    probs_stride_position,
    num_positions,
    num_statistics,
    num_chunks,
    chunk_blocks,
    SCALE: tl.constexpr,
    ON_GPU: tl.constexpr,
    POSITIONS: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B, chunks): the best of one chunk of the row behind the accepted drafts.

    Twice: in the residual, and in the target's own row, which counts if no residual is left;
    ``values`` and ``indices`` are ``[2, B, chunks]``.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_logits = logits + row * logits_stride_row
    row_probs = draft_probs + row * probs_stride_row
    row_positions = positions + row * num_positions
    row_seed = tl.load(row_seeds + row)
    accepted, largest, total = _decide(
        row_logits,
        draft_ids + row * (num_positions - 1),
        row_probs,
        row_seed,
        row_positions,
        statistics + row * num_positions * num_statistics,
        statistics + (tl.num_programs(0) + row) * num_positions * num_statistics,
        temperature,
        vocabulary,
        logits_stride_position,
        probs_stride_position,
        num_positions,
        num_statistics,
        SCALE,
        ON_GPU,
        POSITIONS,
        STATISTICS,
    )
    if chunk == 0:
        tl.store(num_accepted + row, accepted.to(tl.int64))
    at = accepted.to(tl.int64)
    start = chunk * (chunk_blocks * BLOCK)
    end = tl.minimum(start + chunk_blocks * BLOCK, vocabulary)
    # Nothing to read without a distribution (the result is token 0, as in the twin), and no draft
    # to subtract behind the last one. (A mask may not be combined with a scalar condition.)
    end = tl.where(total > 0.0, end, start)
    probs_end = tl.where(accepted < num_positions - 1, end, start)
    best, best_ids, target_best, target_best_ids = _race(
        row_logits + at * logits_stride_position,
        row_probs + at * probs_stride_position,
        row_seed,
        tl.load(row_positions + at),
        largest,
        total,
        temperature,
        start,
        end,
        probs_end,
        SCALE,
        ON_GPU,
        BLOCK,
    )
    out = row * num_chunks + chunk
    store_best(values, indices, out, best, best_ids)
    out += tl.num_programs(0).to(tl.int64) * num_chunks
    store_best(values, indices, out, target_best, target_best_ids)


@triton.jit(do_not_specialize=["num_positions", "num_chunks"])
def rejection_finish(
    values,
    indices,
    draft_ids,
    num_accepted,
    tokens,
    num_positions,
    num_chunks,
    POSITIONS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (B,): the sampled token of one request, behind its accepted drafts."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    inside = chunk < num_chunks
    residual = tl.load(values + at, mask=inside, other=_LOWEST)
    ids = tl.load(indices + at, mask=inside, other=NONE)
    largest, _, index = best_of(residual, ids, 0)
    at += tl.num_programs(0).to(tl.int64) * num_chunks
    target = tl.load(values + at, mask=inside, other=_LOWEST)
    target_ids = tl.load(indices + at, mask=inside, other=NONE)
    _, _, target_index = best_of(target, target_ids, 0)
    token = tl.where(largest > _LOWEST, index, target_index).to(tl.int64)
    accepted = tl.load(num_accepted + row)
    position = tl.arange(0, POSITIONS)
    draft_at = draft_ids + row * (num_positions - 1) + position
    drafted = tl.load(draft_at, mask=position < num_positions - 1, other=0)
    emitted = tl.where(position == accepted, token, drafted)
    tl.store(tokens + row * num_positions + position, emitted, mask=position < num_positions)


def verify_rejection(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    logits: torch.Tensor,
    row_seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a draft with probability min(1, target / draft), else sample the residual.

    Args:
        draft_ids: int64 ``[B, K]``, K >= 1.
        draft_probs: float32 ``[B, K, V]``, rows dense.
        logits: ``[B, K + 1, V]`` in float32, bfloat16 or float16; rows dense.
        row_seeds: int64 ``[B]``.
        positions: int64 ``[B, K + 1]``.
        temperature: divides the logits.

    Returns:
        int64 ``[B, K + 1]``, tokens, and int64 ``[B]``, the accepted draft tokens.
    """
    num_positions = draft_ids.shape[1] + 1
    logits, positions = logits[:, :num_positions], positions[:, :num_positions]
    requests, _, vocabulary = logits.shape
    device = logits.device
    statistics, rows = softmax_statistics(logits, temperature)
    last = split(vocabulary, requests, 1, _BLOCK, device)
    values = torch.empty((2, requests, last.chunks), dtype=torch.float32, device=device)
    indices = torch.empty((2, requests, last.chunks), dtype=torch.int32, device=device)
    tokens = torch.empty((requests, num_positions), dtype=torch.long, device=device)
    num_accepted = torch.empty(requests, dtype=torch.long, device=device)
    draft_ids = draft_ids.contiguous()
    with on_device_of(logits):
        sample_residual[(requests, last.chunks)](
            *(logits, draft_ids, draft_probs, row_seeds.contiguous(), positions.contiguous()),
            *(statistics, num_accepted, values, indices),
            1.0 if temperature is None else float(temperature),
            *(vocabulary, *logits.stride()[:2], *draft_probs.stride()[:2]),
            *(num_positions, rows.chunks, last.chunks, last.blocks),
            SCALE=temperature is not None,
            ON_GPU=logits.is_cuda,
            POSITIONS=rows.positions_padded,
            STATISTICS=rows.chunks_padded,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # torch rounds after every operation
        )
        rejection_finish[(requests,)](
            *(values, indices, draft_ids, num_accepted, tokens, num_positions, last.chunks),
            POSITIONS=rows.positions_padded,
            CHUNKS=last.chunks_padded,
            num_warps=_FINISH_WARPS,
        )
    return tokens, num_accepted


_POINTERS = {
    "draft_ids": "*i64",
    "draft_probs": "*fp32",
    "row_seeds": "*i64",
    "positions": "*i64",
    "statistics": "*fp32",
    "num_accepted": "*i64",
    "values": "*fp32",
    "indices": "*i32",
    "tokens": "*i64",
}
_LOGITS = ("logits", "vocabulary", "logits_stride_row", "logits_stride_position")


def variants() -> list[Variant]:
    """The kernels of this file as they are launched for Q = 5 positions."""
    tile = {"POSITIONS": 8, "CHUNKS": MOST_CHUNKS}
    return [
        *(_residual_variant(name) for name in TRITON_TYPES.values()),
        Variant(
            name="rejection_finish",
            kernel=rejection_finish,
            signature=signature(rejection_finish, _POINTERS, tile),
            constexprs=tile,
            divisible_by_16=("values", "indices", "draft_ids", "num_accepted", "tokens"),
            num_warps=_FINISH_WARPS,
            bytes_moved="B * chunks * 16 read, B * Q * 16 for drafts and tokens",
            floor="B * Q * 16",
        ),
    ]


def _residual_variant(dtype: str) -> Variant:
    modes = {"SCALE": True, "ON_GPU": True, "BLOCK": _BLOCK}
    modes |= {"POSITIONS": 8, "STATISTICS": MOST_CHUNKS}
    types = _POINTERS | {"logits": f"*{dtype}", "temperature": "fp32"}
    arguments = signature(sample_residual, types, modes)
    pointers = (name for name, kind in arguments.items() if kind.startswith("*"))
    return Variant(
        name=f"sample_residual {dtype}",
        kernel=sample_residual,
        signature=arguments,
        constexprs=modes,
        divisible_by_16=(*pointers, *_LOGITS[1:], "probs_stride_row", "probs_stride_position"),
        num_warps=_WARPS,
        bytes_moved="B * V * (itemsize + 4) read where a draft is refused, B * V * itemsize else",
        floor="the same",
    )
