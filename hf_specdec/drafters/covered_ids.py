"""A reduced draft vocabulary whose ids reach beyond a target's smaller vocabulary.

Vocabularies are padded differently, so a drafter may know ids that its target has no row for. They
are never drafted, and what the others were sampled from is said of the others alone.
"""

from __future__ import annotations

import torch

from hf_specdec.drafters.base import NodeLogits, PickToken


class CoveredIds:
    """Which columns of a drafter's logits the target has ids for.

    Args:
        draft_token_ids: int64 ``[V']``, the ids of the columns.
        num_target_ids: V of the target.

    Raises:
        ValueError: it has none of them.
    """

    def __init__(self, draft_token_ids: torch.Tensor, num_target_ids: int):
        self._beyond = draft_token_ids >= num_target_ids
        self._columns = (~self._beyond).nonzero()[:, 0]
        self._ids = draft_token_ids[self._columns]
        if len(self._columns) == 0:
            raise ValueError(
                f"assistant_model drafts {len(draft_token_ids)} ids of {int(draft_token_ids.min())}"
                f" and above, but the target has only {num_target_ids} ids. Use the speculator "
                "that was trained for this target."
            )

    def pick_with(self, pick: PickToken) -> PickToken:
        """The engine's ``pick``, shown the columns that count."""
        return _CoveredPick(pick, self._columns, self._ids)

    def nodes_with(self, node_logits: NodeLogits) -> NodeLogits:
        """The engine's ``node_logits``, for which the others can't be drafted."""

        def covered(
            k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return node_logits(k, logits.masked_fill(self._beyond, -torch.inf), token_ids)

        return covered


class _CoveredPick:
    """A `PickToken` of some columns, in terms of all."""

    def __init__(self, pick: PickToken, columns: torch.Tensor, ids: torch.Tensor):
        self._pick, self._columns, self._ids = pick, columns, ids

    @property
    def done(self) -> bool:
        """As the engine's."""
        return self._pick.done

    @done.setter
    def done(self, value: bool) -> None:
        self._pick.done = value

    def __call__(
        self, k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """See `PickToken`."""
        return self._columns[self._pick(k, logits[:, self._columns], self._ids)]
