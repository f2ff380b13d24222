"""RowStreamer: the tokens of a batch while it is generated, row by row."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class RowStep:
    """What one step emitted for one row.

    Attributes:
        row: index of the row in the batch that was passed to ``generate``.
        token_ids: the new tokens, never a rejected one.
        num_draft_tokens: tokens that were drafted for this step; 0 for a row's first.
        num_accepted_tokens: how many of ``token_ids`` were drafted.
        is_last: whether the row is finished.
    """

    row: int
    token_ids: list[int]
    num_draft_tokens: int
    num_accepted_tokens: int
    is_last: bool


class RowStreamer(BaseStreamer):
    """A ``streamer`` for batches: rows advance at their own pace and end at their own time.

    For ``generate`` with a drafter, whose loop calls `put_rows` once a step. Transformers' own
    loops know nothing of rows, so there it raises.
    """

    def __init__(self) -> None:
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, int64 ``[B, T]``, which ``generate`` hands over first, and skip them.

        Raises:
            RuntimeError: called again, which only transformers' own loops do.
        """
        if self._prompt_seen:
            raise RuntimeError(
                f"{type(self).__name__} is a RowStreamer, which transformers' own loops can't "
                "serve. Call generate() with assistant_model, or on a model with an attached "
                "drafter; num_assistant_tokens=0 decodes there without drafts"
            )
        self._prompt_seen = True

    def end(self) -> None:
        """Every row is finished."""

    @abstractmethod
    def put_rows(self, steps: list[RowStep]) -> None:
        """Take a step's tokens, of all rows that were active in it."""
