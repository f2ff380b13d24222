"""Rows: what a batch is made of. A request is one row for each text that it asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_specdec.metrics import SpeculationStats
from hf_specdec.serving.row_text import RowText
from hf_specdec.serving.sampling import Sampling
from hf_specdec.stopping import RowStoppingCriteria
from hf_specdec.streaming import RowStep, RowStreamer

logger = logging.getLogger(__name__)
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Update:
    """What a row has to say to the request it belongs to.

    Attributes:
        pieces: new text, see `RowText.release`.
        is_last: nothing follows.
        error: why there is no result, if there is none.
    """

    pieces: list[Any] = field(default_factory=list)
    is_last: bool = False
    error: str | None = None


class Row:
    """One text to generate.

    The engine's thread writes it; the request's side reads it after the last update, and may set
    ``cancelled`` at any time. A row that has ``failed`` has had its last update.

    Args:
        prompt_ids: at least one token.
        max_new_tokens: its own limit.
        sampling: how it chooses tokens.
        seed: of its sampling noise.
        text: decodes it.
        deliver: called in the engine's thread with every `Update`.
        streams: whether text is delivered before the end.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        text: RowText,
        deliver: Callable[[Update], None],
        streams: bool,
    ):
        self.prompt_ids = prompt_ids
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.seed = seed
        self._text = text
        self._deliver = deliver
        self._streams = streams
        self.cancelled = self.failed = False
        self.num_tokens = 0
        self.stats = SpeculationStats()
        self.finish_reason: FinishReason | None = None
        self.arrived = time.monotonic()
        self.started: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Take tokens; returns how many, if the row ends with one of them."""
        if self.cancelled or self.failed:
            self.finish_reason = "cancelled"
            self.num_tokens += 1
            return 1
        for count, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            if self._text.push(token_id):
                self.finish_reason = "stop"
                return count
            if self.num_tokens == self.max_new_tokens:
                return count
        return None

    def record(self, step: RowStep, end_ids: frozenset[int]) -> None:
        """Count a step."""
        now = time.monotonic()
        self.first_token = self.first_token or now
        self.stats += SpeculationStats.of_step(
            len(step.token_ids), step.num_draft_tokens, step.num_accepted_tokens
        )
        if step.is_last:
            if self.finish_reason is None:
                self.finish_reason = "stop" if step.token_ids[-1] in end_ids else "length"
            self.finished = now

    def update(self) -> Update | None:
        """The text that is new: all of it at the end, before that only when streaming."""
        if self.finished is not None:
            return Update(self._text.release(final=True), is_last=True)
        if self._streams and (pieces := self._text.release()):
            return Update(pieces)
        return None

    def deliver(self, update: Update) -> None:
        """Hand an update over."""
        self._deliver(update)

    def fail(self, error: str) -> None:
        """Deliver that there is no result, once."""
        if not self.failed:
            self.failed = True
            self._deliver(Update(is_last=True, error=error))


class BatchMonitor(RowStoppingCriteria, RowStreamer):
    """Lets every row of a batch end by its own limits and hear of its own tokens.

    Args:
        rows: in the order of the batch.
        end_ids: end-of-sequence ids.
        on_finished: called with each row when it has its result.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        end_ids: frozenset[int],
        on_finished: Callable[[Row], None],
    ):
        RowStreamer.__init__(self)
        self._rows = rows
        self._end_ids = end_ids
        self._on_finished = on_finished

    def first_stop(self, row: int, token_ids: Sequence[int]) -> int | None:
        """See `RowStoppingCriteria.first_stop`."""
        try:
            return self._rows[row].accept(token_ids)
        except Exception as error:
            self._lose(self._rows[row], error)
            return 1

    def put_rows(self, steps: list[RowStep]) -> None:
        """See `RowStreamer.put_rows`."""
        for step in steps:
            row = self._rows[step.row]
            row.record(step, self._end_ids)
            if row.failed:
                continue
            try:
                update = row.update()
            except Exception as error:
                self._lose(row, error)
                continue
            if step.is_last:
                # First, so that a client that has its answer finds it counted.
                self._on_finished(row)
            if update is not None:
                row.deliver(update)

    def _lose(self, row: Row, error: Exception) -> None:
        """Let a row whose text can't be made fail alone; its next token is its last."""
        logger.error("a row failed", exc_info=error)
        row.fail(f"{type(error).__name__}: {error}")
