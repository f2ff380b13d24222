"""Counter-based random numbers: noise that is a pure function of (row seed, position, token).

The sampling rule of this library is ``argmax(logits + gumbel)`` (the Gumbel-max trick: the result
is distributed as ``softmax(logits)``). Because the noise does not depend on what was computed
before, a position gets the same token whatever was drafted for it, however many tokens a step
verifies, and whoever else is in the batch.

A row seed (64 bits), a position and a *stream* are hashed to two 32-bit keys; each token id is then
hashed with these keys. All arithmetic is exact integer arithmetic in int64 (products of two 32-bit
numbers, the low 32 bits kept), so that every device computes the same bits. The multipliers are
those of Chris Wellons' ``lowbias32`` hash, whose bias is near the theoretical minimum.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B
_GOLDEN = 0x9E3779B9


class Stream(IntEnum):
    """Independent sources of noise for one position: each use of noise has its own."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit values held in int64: a bijection of [0, 2**32) without visible structure."""
    x = (x ^ (x >> 16)) * _MULTIPLY_1 & _MASK
    x = (x ^ (x >> 15)) * _MULTIPLY_2 & _MASK
    return x ^ (x >> 16)


def _keys(
    row_seeds: torch.Tensor, positions: torch.Tensor, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit keys for each (row seed, position) pair; shapes broadcast."""
    low = row_seeds & _MASK
    high = (row_seeds >> 32) & _MASK
    first = _mix(low ^ _mix(high ^ _mix((positions * _GOLDEN + stream + 1) & _MASK)))
    second = _mix((first + _mix((positions + _GOLDEN) & _MASK) + high) & _MASK)
    return first, second


def _bits(
    row_seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, stream: int
) -> torch.Tensor:
    """32 random bits for each (row seed, position, token), as int64 in [0, 2**32)."""
    first, second = _keys(row_seeds, positions, stream)
    return _mix(_mix((token_ids * _GOLDEN & _MASK) ^ first) ^ second)


def _unit_interval(bits: torch.Tensor) -> torch.Tensor:
    """Map 32 bits to float32 in (0, 1); fine resolution near 0, never exactly 0 or 1."""
    return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)


def uniform(row_seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """One uniform number in (0, 1) for each row and position.

    Args:
        row_seeds: int64, broadcastable with ``positions``.
        positions: int64 token positions (padding not counted).
        stream: which source of noise to read.

    Returns:
        float32, the broadcast shape of ``row_seeds`` and ``positions``.
    """
    return _unit_interval(_bits(row_seeds, positions, torch.zeros_like(positions), stream))


def gumbel(
    row_seeds: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    stream: Stream = Stream.TOKEN,
) -> torch.Tensor:
    """Standard Gumbel noise, a pure function of its arguments; shapes broadcast.

    The large values, which decide a choice, come from the small uniforms, where float32 is finest:
    ``-log(-log1p(-u))`` resolves the tail up to 22.9, enough for any vocabulary.

    Args:
        row_seeds: int64 seeds, one a row.
        positions: int64 positions of the tokens to be chosen (padding not counted).
        token_ids: int64 vocabulary ids.
        stream: which source of noise to read.

    Returns:
        float32, the broadcast shape of the three arguments.
    """
    u = _unit_interval(_bits(row_seeds, positions, token_ids, stream))
    return u.neg_().log1p_().neg_().log_().neg_()


def add_gumbel(
    logits: torch.Tensor,
    row_seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: Stream = Stream.TOKEN,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """``logits + gumbel``, with noise computed only where it can matter.

    Filters such as top-k leave a few dozen finite logits a position. On CPU only those get noise
    (on an accelerator finding them would cost a synchronisation, and dense noise is cheap there).
    Both ways give the same bits.

    Args:
        logits: float32 ``[B, Q, V]``; ``-inf`` marks tokens that cannot be chosen. Not modified.
        row_seeds: int64 ``[B]``.
        positions: int64 ``[B, Q]``.
        stream: which source of noise to read.
        token_ids: int64 ``[V]``, the vocabulary ids of the columns; by default 0..V-1.

    Returns:
        float32 ``[B, Q, V]``.
    """
    seeds = row_seeds[:, None]
    if logits.device.type == "cpu":
        finite = torch.isfinite(logits)
        if 4 * int(finite.sum()) < logits.numel():
            rows, queries, columns = finite.nonzero(as_tuple=True)
            ids = columns if token_ids is None else token_ids[columns]
            noise = gumbel(row_seeds[rows], positions[rows, queries], ids, stream)
            noisy = torch.full_like(logits, -torch.inf)
            noisy[rows, queries, columns] = logits[rows, queries, columns] + noise
            return noisy
    if token_ids is None:
        token_ids = torch.arange(logits.shape[-1], device=logits.device)
    return logits + gumbel(seeds[..., None], positions[..., None], token_ids, stream)
