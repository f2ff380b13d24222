"""Which draft tokens are accepted, and which token follows them.

Plain torch on any device; on CUDA, Triton kernels that do the same in one or two passes over the
logits (`hf_specdec.kernels`), if they have agreed with plain torch there.

Shape letters used throughout the project: B rows (batch), T context, K draft tokens, Q = K + 1
verified positions, V vocabulary, d hidden size.

The default rule is the same for greedy decoding and for sampling. The token that the target
*chooses* at a position is ``argmax(processed_logits + noise)``, where the noise is zero for greedy
decoding and otherwise a pure function of row seed, position and token (see `noise`). A draft token
is accepted while it equals that choice, and the first choice that differs is emitted in its place,
so the output is what the target alone emits, token for token. (Coupled, or drafter-invariant,
speculative decoding: Daliri, Musco and Suresh 2024, arXiv 2408.07978.)

`verify_rejection` is the classical alternative (Leviathan et al. 2023, arXiv 2211.17192; Chen et
al. 2023, arXiv 2302.01318): it keeps the target's *distribution* and needs the probabilities from
which the draft was really sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_specdec.kernels import runtime
from hf_specdec.modeling.largest import index_of_largest
from hf_specdec.noise import Stream, add_gumbel, uniform


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification.

    Attributes:
        tokens: int64 ``[B, K + 1]``; row b emits ``tokens[b, : num_accepted[b] + 1]``. What stands
            behind those is undefined.
        num_accepted: int64 ``[B]``, accepted draft tokens in 0..K; the bonus token isn't counted.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor


def choose_tokens(
    logits: torch.Tensor,
    row_seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: float | None = None,
) -> torch.Tensor:
    """The target's own choice at every position.

    Args:
        logits: ``[B, Q, V]`` in any float dtype, after the logits processors.
        row_seeds: int64 ``[B]``; ``None`` chooses greedily.
        positions: int64 ``[B, Q]``, the positions of the tokens to be chosen.
        temperature: divides the logits, in float32, before the noise is added.

    Returns:
        int64 ``[B, Q]``. Among equal values the lowest index wins.
    """
    if temperature is not None:
        logits = logits.float() / temperature
    if row_seeds is not None:
        assert positions is not None
        logits = add_gumbel(logits.float(), row_seeds, positions)
    elif logits.dtype == torch.float64:
        # generate() compares in float32; two values that are one there must tie here too.
        logits = logits.float()
    return index_of_largest(logits)


def count_accepted(draft_ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Length of the longest prefix of the draft that equals the target's choices.

    Args:
        draft_ids: int64 ``[B, K]``.
        chosen: int64 ``[B, K + 1]``.

    Returns:
        int64 ``[B]`` in 0..K.
    """
    matches = draft_ids == chosen[:, : draft_ids.shape[1]]
    return matches.cumprod(dim=1).sum(dim=1)


def verify_match(
    draft_ids: torch.Tensor,
    logits: torch.Tensor,
    row_seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: float | None = None,
) -> Verdict:
    """Accept drafts while they equal the target's own choice (exact, greedy and sampled).

    Args:
        draft_ids: int64 ``[B, K]``.
        logits: ``[B, K + 1, V]``, processed.
        row_seeds: int64 ``[B]``, or ``None`` for greedy decoding.
        positions: int64 ``[B, K + 1]``, needed with ``row_seeds``.
        temperature: what the logits are still to be divided by. A kernel does it on the way, so
            that no scaled copy of them is made.
    """
    if runtime.usable(logits, draft_ids, row_seeds, positions):
        from hf_specdec.kernels import trials

        if trials.matching_is_trusted(match_in_torch, logits, row_seeds, temperature):
            from hf_specdec.kernels import matching

            arguments = (draft_ids, logits, row_seeds, positions, temperature)
            return Verdict(*matching.verify_match(*arguments))
    return match_in_torch(draft_ids, logits, row_seeds, positions, temperature)


def match_in_torch(
    draft_ids: torch.Tensor,
    logits: torch.Tensor,
    row_seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: float | None = None,
) -> Verdict:
    """`verify_match` in plain torch."""
    chosen = choose_tokens(logits, row_seeds, positions, temperature)
    return Verdict(chosen, count_accepted(draft_ids, chosen))


def verify_rejection(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    logits: torch.Tensor,
    row_seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: float | None = None,
) -> Verdict:
    """Accept a draft with probability min(1, target / draft), else sample the residual.

    Exact in distribution if ``draft_ids[b, k]`` was sampled from ``draft_probs[b, k]`` with noise
    that is independent of the streams ``ACCEPT`` and ``RESIDUAL`` read here. A draft chosen by
    argmax has a one-hot distribution; passing its softmax instead would bias the output.

    Args:
        draft_ids: int64 ``[B, K]``.
        draft_probs: float32 ``[B, K, V]``, what each draft token was sampled from.
        logits: ``[B, K + 1, V]``, the target's processed logits.
        row_seeds: int64 ``[B]``.
        positions: int64 ``[B, K + 1]``.
        temperature: what the logits are still to be divided by.
    """
    if runtime.usable(logits, draft_ids, draft_probs, row_seeds, positions):
        from hf_specdec.kernels import trials

        if trials.rejection_is_trusted(reject_in_torch, logits, draft_probs, temperature):
            from hf_specdec.kernels import rejection

            arguments = (draft_ids, draft_probs, logits, row_seeds, positions, temperature)
            return Verdict(*rejection.verify_rejection(*arguments))
    return reject_in_torch(draft_ids, draft_probs, logits, row_seeds, positions, temperature)


def reject_in_torch(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    logits: torch.Tensor,
    row_seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: float | None = None,
) -> Verdict:
    """`verify_rejection` in plain torch."""
    num_draft_tokens = draft_ids.shape[1]
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature
    target_probs = logits.softmax(dim=-1)
    index = draft_ids[..., None]
    target_at_draft = target_probs[:, :num_draft_tokens].gather(-1, index)[..., 0]
    draft_at_draft = draft_probs.gather(-1, index)[..., 0]
    u = uniform(row_seeds[:, None], positions[:, :num_draft_tokens], Stream.ACCEPT)
    accepted = (u * draft_at_draft < target_at_draft).long()
    num_accepted = accepted.cumprod(dim=1).sum(dim=1)

    # Where every draft was accepted there is nothing to subtract: the bonus token is the target's.
    row = torch.arange(draft_ids.shape[0], device=draft_ids.device)
    padded_draft_probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    target_row = target_probs[row, num_accepted]
    left = target_row - padded_draft_probs[row, num_accepted]
    # Not clamp, which keeps NaN: what was drafted with an unknown probability isn't left over.
    residual = torch.fmax(left, left.new_zeros(()))
    # Equal distributions leave only rounding in the residual; the target's own row is then right.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target_row)
    position = positions.gather(1, num_accepted[:, None])
    noisy = add_gumbel(residual.log()[:, None], row_seeds, position, Stream.RESIDUAL)
    tokens = torch.nn.functional.pad(draft_ids, (0, 1))
    tokens = tokens.scatter(1, num_accepted[:, None], index_of_largest(noisy))
    return Verdict(tokens, num_accepted)
