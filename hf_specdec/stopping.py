"""Where a row stops when several tokens arrive at once: at the token where plain generation stops.

End-of-sequence ids and the length limit are decided on the device for all rows together. Any other
criterion (time, stop strings, the user's own) is asked token by token, about the prefix it would
have seen. It is asked once for every row, so it must depend on its arguments (or on something
outside, such as a clock), not on how often it was called.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


class StoppingRules:
    """The stopping criteria of one ``generate`` call.

    Args:
        criteria: as transformers built them.
        eos_token_ids: int64 ``[E]`` on the target's device, or ``None``.
        max_length: tokens of a finished row, prompt and padding included.
        num_rows: rows of the whole batch, finished ones included.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        eos_token_ids: torch.Tensor | None,
        max_length: int,
        num_rows: int,
    ):
        self.max_length = max_length
        self._num_rows = num_rows
        self._eos_token_ids = eos_token_ids
        self._others = StoppingCriteriaList(
            c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )

    @property
    def asks_per_token(self) -> bool:
        """Whether `first_stop` has anything to ask."""
        return len(self._others) > 0

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
            is_eos = torch.isin(tokens, self._eos_token_ids)
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
        num_before = 0 if scores is None else len(scores) - (sequence.shape[0] - start)
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
