"""Asking a drafter, and taking nothing from it that the target can't run.

A drafter's tokens are checked by the target, so whatever it proposes the text is right; but it may
be anybody's code, and an id that no vocabulary has, or a tensor of another shape, would fail in the
middle of a forward. What costs nothing to look at (type, shape, dtype, device) is an error. Ids
outside the vocabulary, which the host can't see without waiting for the device, count as the
nearest id there is: a draft like any other, that is right where the target chooses it.
"""

from __future__ import annotations

import torch

from hf_specdec.drafters.base import Drafter, NodeLogits
from hf_specdec.drafting import DraftPicker
from hf_specdec.tree import TokenTree, TreeShape

_OWN_PACKAGE = __name__.partition(".")[0]


class Proposals:
    """What a drafter proposes in one call of ``generate``.

    Args:
        drafter: ours, or anybody's.
        vocabulary: V, ids of the target.
    """

    def __init__(self, drafter: Drafter, vocabulary: int):
        self._drafter = drafter
        kind = type(drafter.source)
        self._name = kind.__name__
        self._vocabulary = vocabulary
        # Ours draft ids of the target's vocabulary and nothing else.
        self._is_ours = kind.__module__.partition(".")[0] == _OWN_PACKAGE

    def chain(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: DraftPicker | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft a chain for every row.

        Args:
            token_ids: int64 ``[n]``, the last token of each row.
            num_draft_tokens: K, at least 1.
            pick: chooses each token, if the call has a say in it.

        Returns:
            int64 ``[n, K]``, or fewer columns; and what they were sampled from, float32
            ``[n, K, V]``, if ``pick`` keeps that.

        Raises:
            ValueError: something else than such ids came.
        """
        draft_ids = self._drafter.propose(token_ids, num_draft_tokens, pick)
        self._check("propose", draft_ids, token_ids)
        if draft_ids.shape[1] > num_draft_tokens:
            raise ValueError(
                f"assistant_model {self._name}: propose returned {draft_ids.shape[1]} tokens a "
                f"row, it was asked for at most {num_draft_tokens}"
            )
        probs = None
        if pick is not None and pick.keeps_probs and draft_ids.shape[1]:
            if pick.num_picked != draft_ids.shape[1]:
                raise ValueError(
                    f"verification='rejection' compares with what each draft was sampled from, but "
                    f"assistant_model {self._name} chose {pick.num_picked} of its "
                    f"{draft_ids.shape[1]} tokens with pick; let it choose all of them so, or use "
                    "verification='match'"
                )
            probs = pick.probs
        if self._is_ours:
            return draft_ids, probs
        known = draft_ids.clamp(0, self._vocabulary - 1)
        if probs is not None:
            # It wasn't sampled from these: never accepted, the target's own row counts.
            probs = probs.masked_fill((known != draft_ids)[..., None], torch.nan)
        return known, probs

    def tree(
        self, token_ids: torch.Tensor, depth: int, shape: TreeShape | None, node_logits: NodeLogits
    ) -> tuple[torch.Tensor, TokenTree]:
        """Draft a tree for every row; arguments and result are `Drafter.propose_tree`'s.

        Raises:
            ValueError: something else than a tree and the ids of its nodes came.
        """
        draft_ids, tree = self._drafter.propose_tree(token_ids, depth, shape, node_logits)
        self._check("propose_tree", draft_ids, token_ids)
        if not isinstance(tree, TokenTree) or draft_ids.shape[1] != tree.size - 1:
            nodes = tree.size - 1 if isinstance(tree, TokenTree) else 0
            raise ValueError(
                f"assistant_model {self._name}: propose_tree returned {draft_ids.shape[1]} tokens "
                f"a row and a {type(tree).__name__} of {nodes} nodes; it must be a TokenTree with "
                "one node for each token"
            )
        return (draft_ids if self._is_ours else draft_ids.clamp(0, self._vocabulary - 1)), tree

    def _check(self, method: str, draft_ids: object, token_ids: torch.Tensor) -> None:
        rows = token_ids.shape[0]
        if (
            isinstance(draft_ids, torch.Tensor)
            and draft_ids.dim() == 2
            and draft_ids.shape[0] == rows
            and draft_ids.dtype == torch.int64
            and draft_ids.device == token_ids.device
        ):
            return
        found = f"a {type(draft_ids).__name__}"
        if isinstance(draft_ids, torch.Tensor):
            found = f"{draft_ids.dtype} {list(draft_ids.shape)} on {draft_ids.device}"
        raise ValueError(
            f"assistant_model {self._name}: {method} returned {found}; it must return token ids, "
            f"int64 [{rows}, K] on {token_ids.device}, one row for each that is still generating"
        )
