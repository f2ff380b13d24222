"""A drafter that drafts nothing: the target alone, in our loop.

With it a call can be sampled by `row_seeds`, which plain ``generate`` doesn't know, and the tokens
are those that every drafter gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_specdec.drafters.base import Drafter, PickToken, VerifiedStep
from hf_specdec.targets.prompt import Prompt


class NoDrafts(Drafter):
    """K = 0, for any target."""

    @property
    def max_draft_tokens(self) -> int:
        """0."""
        return 0

    def check(self, target: PreTrainedModel) -> None:
        """Nothing has to fit."""

    def start(
        self,
        target: PreTrainedModel,
        prompt: Prompt | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """Nothing to prepare."""

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""

    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """No tokens, ``[n, 0]``."""
        return token_ids[:, None][:, :0]

    def keep_rows(self, order: Sequence[int]) -> None:
        """No state."""
