"""Where a row stops when several tokens arrive at once: at the token where plain generation stops.

End-of-sequence ids and the length limit are decided on the device for all rows together. Any other
criterion (time, stop strings, the user's own) is asked token by token, about the prefix it would
have seen. It is asked once for every row, so it must depend on its arguments (or on something
outside, such as a clock), not on how often it was called. A `RowStoppingCriteria` is asked once a
step for each row, about all of its new tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)


class RowStoppingCriteria(StoppingCriteria):
    """Stops each row of a batch by a rule of its own; may keep a state for every row.

    For ``generate`` with a drafter; transformers' own loops can't ask it, so there it raises.
    """

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError: only transformers' own loops ask about a whole batch."""
        raise RuntimeError(
            f"{type(self).__name__} is a RowStoppingCriteria, which transformers' own loops can't "
            "ask. Call generate() with assistant_model, or on a model with an attached drafter; "
            "num_assistant_tokens=0 decodes there without drafts"
        )

    @abstractmethod
    def first_stop(self, row: int, token_ids: Sequence[int]) -> int | None:
        """Say where a row ends; called exactly once for every token that a row may emit.

        Args:
            row: index of the row in the whole batch.
            token_ids: the tokens about to be emitted, at least one, an end-of-sequence id
                included.

        Returns:
            How many of them the row emits before it is finished (at least 1), or ``None`` if it
            goes on.
        """


def _is_in(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Which tokens are among the ids; without `torch.isin`'s preparations where there is one."""
    return tokens == ids if ids.numel() == 1 else torch.isin(tokens, ids)


class StoppingRules:
    """The stopping criteria of one ``generate`` call.

    Args:
        criteria: as transformers built them.
        eos_token_ids: int64 ``[E]`` on the target's device, or ``None``.
        max_length: tokens of a finished row, prompt and padding included.
        num_rows: rows of the whole batch, finished ones included.
        device: where plain generation shows other criteria what they are asked about; where it is
            if ``None``.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        eos_token_ids: torch.Tensor | None,
        max_length: int,
        num_rows: int,
        device: torch.device | None = None,
    ):
        self.max_length = max_length
        self._device = device
        self._num_rows = num_rows
        self._eos_token_ids = eos_token_ids
        self._of_rows = [c for c in criteria if isinstance(c, RowStoppingCriteria)]
        known = (EosTokenCriteria, MaxLengthCriteria)
        self._others = StoppingCriteriaList(
            c for c in criteria if type(c) not in known and c not in self._of_rows
        )

    @property
    def asks_rows(self) -> bool:
        """Whether `first_stop` has anything to ask."""
        return len(self._others) + len(self._of_rows) > 0

    def cut(
        self, tokens: torch.Tensor, num_tokens: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut what each row emits at its first end-of-sequence id and at the length limit.

        Args:
            tokens: int64 ``[n, Q]``.
            num_tokens: int64 ``[n]``, how many of them are to be emitted.
            lengths: int64 ``[n]``, tokens of the rows so far.

        Returns:
            The smaller counts, int64 ``[n]``, and whether each row is finished, bool ``[n]``.
        """
        room = self.max_length - lengths
        finished = num_tokens >= room
        num_tokens = torch.minimum(num_tokens, room)
        if self._eos_token_ids is not None:
            is_eos = _is_in(tokens, self._eos_token_ids)
            index = torch.arange(tokens.shape[1], device=tokens.device)
            # One past the first end-of-sequence id, or the width if there is none.
            first = torch.where(is_eos, index, tokens.shape[1]).amin(dim=1) + 1
            finished = finished | (first <= num_tokens)
            num_tokens = torch.minimum(num_tokens, first)
        return num_tokens, finished

    def first_stop(
        self,
        row: int,
        sequence: torch.Tensor,
        start: int,
        scores: tuple[torch.Tensor, ...] | None = None,
    ) -> int | None:
        """Ask the other criteria after each token.

        Args:
            row: index of the row in the whole batch.
            sequence: int64 ``[L]``, the row with the tokens about to be emitted.
            start: index of the first of these tokens.
            scores: ``[V]`` for each token of the row so far and each about to be emitted, if the
                call collects them; criteria see one ``[B, V]`` entry a token, as in plain
                generation.

        Returns:
            How many of the new tokens are emitted when a criterion stops the row, else ``None``.
        """
        stop = self._first_stop_of_others(row, sequence, start, scores)
        if self._of_rows:
            token_ids = sequence[start : None if stop is None else start + stop].tolist()
            for criterion in self._of_rows:
                earlier = criterion.first_stop(row, token_ids)
                if earlier is not None:
                    stop = earlier
                    token_ids = token_ids[:stop]
        return stop

    def _first_stop_of_others(
        self,
        row: int,
        sequence: torch.Tensor,
        start: int,
        scores: tuple[torch.Tensor, ...] | None,
    ) -> int | None:
        """Like `first_stop`, of the criteria that are asked after each token."""
        if not self._others:
            return None
        num_before = 0 if scores is None else len(scores) - (sequence.shape[0] - start)
        if self._device is not None:
            sequence = sequence.to(self._device)
            scores = scores and tuple(entry.to(self._device) for entry in scores)
        for end in range(start + 1, sequence.shape[0] + 1):
            seen: Any = None
            if scores is not None:
                entries = scores[: num_before + end - start]
                seen = tuple(entry.expand(self._num_rows, -1) for entry in entries)
            # Every row looks like this one, as criteria can depend on a row's index.
            ids: Any = sequence[:end].expand(self._num_rows, -1)
            if bool(self._others(ids, seen)[row]):
                return end - start
        return None
