"""The trials of the verification kernels: small inputs on which they must equal their twins.

Nothing of Triton is imported before a trial runs, so that an installation of it that doesn't work
fails the trial, not the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_specdec.kernels.runtime import trusted
from hf_specdec.noise import Stream, gumbel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TEMPERATURE = 0.7
_POSITIONS = 3


def matching_is_trusted(
    twin: Callable[..., Any],
    logits: torch.Tensor,
    row_seeds: torch.Tensor | None,
    temperature: float | None,
) -> bool:
    """Whether `matching.verify_match` takes these arguments and has equalled its twin."""
    if not _readable(logits):
        return False
    sampled, scale = row_seeds is not None, temperature is not None

    def trial() -> bool:
        from hf_specdec.kernels.matching import verify_match

        return all(
            _matching_agrees(verify_match, twin, inputs, sampled, scale)
            for inputs in _trial_logits(logits)
        )

    return trusted(_name("verify_match", logits, sampled, scale), logits, trial)


def rejection_is_trusted(
    twin: Callable[..., Any],
    logits: torch.Tensor,
    draft_probs: torch.Tensor,
    temperature: float | None,
) -> bool:
    """Whether `rejection.verify_rejection` takes these arguments and has equalled its twin."""
    dense = draft_probs.dtype == torch.float32 and draft_probs.stride(-1) == 1
    if not (dense and _readable(logits)):
        return False
    scale = temperature is not None

    def trial() -> bool:
        from hf_specdec.kernels.rejection import verify_rejection

        return all(
            _rejection_agrees(verify_rejection, twin, inputs, scale)
            for inputs in _trial_logits(logits)
        )

    return trusted(_name("verify_rejection", logits, True, scale), logits, trial)


def _readable(logits: torch.Tensor) -> bool:
    """Whether the kernels read these logits: a known float type, and dense rows."""
    return logits.dtype in _DTYPES and logits.stride(-1) == 1 and logits.numel() > 0


def _name(kernel: str, logits: torch.Tensor, sampled: bool, scale: bool) -> str:
    """One name for everything that is compiled on its own."""
    parts = [kernel, "sampled" if sampled else "greedy"]
    parts += ["with temperature"] if scale else []
    parts += ["odd vocabulary"] if logits.shape[-1] % 16 else []
    return ", ".join(parts)


def _trial_logits(like: torch.Tensor) -> list[torch.Tensor]:
    """Logits ``[B, 3, V']``: few rows and many, the last block as full as in ``like``."""
    vocabulary = 8192 + like.shape[-1] % 4096
    device = like.device
    ids = torch.arange(vocabulary, device=device)
    # Few rows are split over many programs; of many rows each is one program's.
    counts = (3, 128) if like.is_cuda else (3,)
    found = []
    for requests in counts:
        seeds = torch.arange(requests, device=device)[:, None, None]
        positions = torch.arange(_POSITIONS, device=device)[:, None]
        logits = (3.0 * gumbel(seeds, positions, ids)).to(like.dtype)
        logits[0, 0, [vocabulary - 1, 5000, 77]] = 60.0  # a tie over lanes, blocks and programs
        logits[1, 1] = -torch.inf
        logits[2, 1, 100:] = -torch.inf
        found.append(logits)
    return found


def _noise_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds, negative ones too, and positions, beyond 32 bits too."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    columns = torch.arange(logits.shape[1], device=logits.device)
    return (rows - 1) * 0x123456789ABCDEF, columns + rows[:, None] * 2**31


def _matching_agrees(
    kernel: Callable[..., Any],
    twin: Callable[..., Any],
    logits: torch.Tensor,
    sampled: bool,
    scale: bool,
) -> bool:
    noise = _noise_of(logits) if sampled else (None, None)
    temperature = _TEMPERATURE if scale else None
    no_draft = torch.empty((logits.shape[0], 0), dtype=torch.long, device=logits.device)
    draft_ids = twin(no_draft, logits, *noise, temperature).tokens[:, :-1].clone()
    rows = torch.arange(logits.shape[0], device=logits.device)
    draft_ids[rows % 3 < 2, (rows % 3)[rows % 3 < 2]] -= 1  # wrong at once, later, never
    expected = twin(draft_ids, logits, *noise, temperature)
    tokens, num_accepted = kernel(draft_ids, logits, *noise, temperature)
    return torch.equal(tokens, expected.tokens) and torch.equal(num_accepted, expected.num_accepted)


def _rejection_agrees(
    kernel: Callable[..., Any], twin: Callable[..., Any], logits: torch.Tensor, scale: bool
) -> bool:
    row_seeds, positions = _noise_of(logits)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    noise = gumbel(row_seeds[:, None, None], positions[:, :-1, None], ids, Stream.DRAFT)
    # A draft that is roughly the target; greedy in its own noise, that is, sampled from it.
    rough = logits[:, :-1].float().clamp(min=-30.0) + noise.flip(-1)
    draft_probs = rough.softmax(dim=-1)
    draft_ids = (rough + noise).argmax(dim=-1)
    draft_probs[0] = 2.0  # more than the target everywhere: nothing is left of the residual
    temperature = _TEMPERATURE if scale else None
    arguments = (draft_ids, draft_probs, logits, row_seeds, positions, temperature)
    expected = twin(*arguments)
    tokens, num_accepted = kernel(*arguments)
    emitted = torch.arange(tokens.shape[1], device=tokens.device) <= num_accepted[:, None]
    return torch.equal(num_accepted, expected.num_accepted) and torch.equal(
        tokens[emitted], expected.tokens[emitted]
    )
