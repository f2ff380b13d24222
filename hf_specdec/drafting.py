"""How the engine picks each draft token from a drafter's logits."""

from __future__ import annotations

import torch

from hf_specdec.modeling.largest import index_of_largest
from hf_specdec.noise import Stream, add_gumbel
from hf_specdec.processors import LogitsPipeline
from hf_specdec.verification import choose_tokens


class DraftPicker:
    """The `PickToken` of one proposal.

    Args:
        pipeline: the call's processors; those that look at logits alone also shape the drafts.
        row_seeds: int64 ``[n]`` for sampling, ``None`` for greedy drafts.
        positions: int64 ``[n, >= K]``, positions of the tokens to be drafted.
        vocabulary: V, ids of the target.
        keep_probs: keep what each token was sampled from, for the rejection rule.
        confidence_threshold: stop after a token that no row gives this probability; 0 never stops.
    """

    def __init__(
        self,
        pipeline: LogitsPipeline,
        row_seeds: torch.Tensor | None,
        positions: torch.Tensor,
        vocabulary: int,
        keep_probs: bool,
        confidence_threshold: float,
    ):
        self.done = False
        self._pipeline = pipeline
        self._row_seeds = row_seeds
        self._positions = positions
        self._vocabulary = vocabulary
        self._keep_probs = keep_probs
        self._threshold = confidence_threshold
        self._probs: list[torch.Tensor] = []

    @property
    def keeps_probs(self) -> bool:
        """Whether there is a `probs`."""
        return self._keep_probs

    @property
    def num_picked(self) -> int:
        """Tokens whose probabilities are kept so far."""
        return len(self._probs)

    @property
    def probs(self) -> torch.Tensor | None:
        """float32 ``[n, K, V]``, what each draft token was sampled from, if kept."""
        if not self._keep_probs:
            return None
        return torch.stack(self._probs, dim=1).to(self._positions.device)

    def __call__(
        self, k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """See `PickToken`."""
        if token_ids is None:
            # A padded drafter vocabulary has columns that the target lacks.
            logits = logits[:, : self._vocabulary]
        if self._row_seeds is None:
            index = choose_tokens(logits)
        else:
            logits = self._pipeline.draft(logits)
            # The target's own noise makes the draft agree with its choice far more often; the
            # rejection rule needs a draft that is independent of it.
            stream = Stream.DRAFT if self._keep_probs else Stream.TOKEN
            # A Gemma 4 assistant may be on another device than the target's head.
            position = self._positions[:, k : k + 1].to(logits.device)
            seeds = self._row_seeds.to(logits.device)
            noisy = add_gumbel(logits[:, None], seeds, position, stream, token_ids)
            index = index_of_largest(noisy[:, 0])
        if self._keep_probs or self._threshold:
            probs = logits.float().softmax(dim=-1)
            if self._keep_probs:
                self._probs.append(_spread(probs, token_ids, self._vocabulary))
            if self._threshold:
                confidence = probs.gather(1, index[:, None])
                # Reads the device: the price of deciding while drafting. NaN is no confidence.
                self.done = not bool((confidence >= self._threshold).any())
        return index


class NodePicker:
    """The `NodeLogits` of one tree: drafts are the children with the largest noisy logits.

    Args:
        pipeline: the call's processors; those that look at logits alone also shape the drafts.
        row_seeds: int64 ``[n]`` for sampling, ``None`` for greedy drafts.
        positions: int64 ``[n]``, position of the token behind the root.
        vocabulary: V, ids of the target.
    """

    def __init__(
        self,
        pipeline: LogitsPipeline,
        row_seeds: torch.Tensor | None,
        positions: torch.Tensor,
        vocabulary: int,
    ):
        self._pipeline = pipeline
        self._row_seeds = row_seeds
        self._positions = positions
        self._vocabulary = vocabulary

    def __call__(
        self, k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `NodeLogits`."""
        if token_ids is None:
            # A padded drafter vocabulary has columns that the target lacks.
            logits = logits[..., : self._vocabulary]
        if self._row_seeds is not None:
            logits = self._pipeline.draft_nodes(logits)
            # The target's own noise, which nodes at the same position share.
            positions = (self._positions + k)[:, None].expand(logits.shape[:2])
            logits = add_gumbel(logits, self._row_seeds, positions, Stream.TOKEN, token_ids)
        return logits, token_ids


def _spread(probs: torch.Tensor, token_ids: torch.Tensor | None, size: int) -> torch.Tensor:
    """Place probabilities ``[B, V']`` of some ids (default 0..V'-1) in a row of ``size``."""
    full = probs.new_zeros((probs.shape[0], size))
    if token_ids is None:
        full[:, : probs.shape[1]] = probs
    else:
        full[:, token_ids] = probs
    return full
