"""What a way of drafting must offer.

A drafter observes every forward of the target and proposes the next tokens of every active row. It
is also a transformers ``CandidateGenerator``, so that it works in transformers' own assisted loop
(one row, whatever that loop verifies) as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator


class PickToken(Protocol):
    """The engine's way to choose draft tokens: called for each of them, in order.

    Attributes:
        done: set by a call after which drafting is to stop; the tokens so far are the proposal.
    """

    done: bool

    def __call__(
        self, k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Choose the k-th draft token.

        Args:
            k: from 0.
            logits: ``[B, V']``.
            token_ids: int64 ``[V']``, the ids of the columns; ``None`` means 0..V'-1.

        Returns:
            int64 ``[B]`` column indices.
        """


@dataclass(frozen=True)
class VerifiedStep:
    """One forward of the target over the active rows, after verification.

    Attributes:
        input_ids: int64 ``[n, Q]``, the tokens of the forward (the prompt's last one in a prefill).
        hidden_states: ``[n, Q, d]``, the target's states at those tokens, after its final norm.
        num_accepted: int64 ``[n]``, draft tokens accepted; index of the last right position.
    """

    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    num_accepted: torch.Tensor


class Drafter(CandidateGenerator, ABC):
    """Proposes draft tokens for the rows of one ``generate`` call.

    Subclasses are stateful: `start` begins a call, `observe` follows every target forward, and
    `keep_rows` drops finished rows.
    """

    requires_model_outputs = True
    # -1: of all hidden states transformers' own loop collects the last layer's alone.
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": -1}

    @property
    @abstractmethod
    def max_draft_tokens(self) -> int:
        """The most tokens `propose` can be asked for."""

    @abstractmethod
    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError if this drafter can't draft for ``target``; no heavy work."""

    @abstractmethod
    def start(self, target: PreTrainedModel) -> None:
        """Begin a call; nothing of an earlier one may remain."""

    @abstractmethod
    def observe(self, step: VerifiedStep) -> None:
        """Take from a target forward what the next proposal needs."""

    @abstractmethod
    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """Draft.

        Args:
            token_ids: int64 ``[n]``, the last token of each row (chosen, not yet run).
            num_draft_tokens: K, at least 1 and at most `max_draft_tokens`.
            pick: chooses each token from its logits, the largest logit by default; look at
                ``pick.done`` after each call.

        Returns:
            int64 ``[n, K]`` ids of the target's vocabulary, fewer columns if ``pick`` was done.
        """

    @abstractmethod
    def keep_rows(self, index: torch.Tensor) -> None:
        """Reorder the state: row i becomes the present row ``index[i]`` (int64 ``[m]``)."""

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """transformers' contract: the row followed by its draft, and no logits (``None``).

        Without logits transformers verifies by comparing tokens, which is exact.
        """
        if kwargs.get("is_first_iteration"):
            return input_ids, None
        last = kwargs["n_last_matches"]
        last = torch.as_tensor(last, device=input_ids.device).reshape(1)
        # A prefill (no match yet, states of the whole prompt) counts from its last position.
        hidden_states = kwargs["model_outputs"].hidden_states[-1]
        width = input_ids.shape[1]
        if hidden_states.shape[1] == width - 1 and self._first_proposal:
            hidden_states, last = hidden_states[:, -1:], torch.zeros_like(last)
        self._first_proposal = False
        self.observe(
            VerifiedStep(input_ids[:, -hidden_states.shape[1] :], hidden_states, num_accepted=last)
        )
        draft = self.propose(input_ids[:, -1], self.max_draft_tokens)
        return torch.cat([input_ids, draft], dim=1), None

    _first_proposal = True
