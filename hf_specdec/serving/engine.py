"""The engine: a queue of rows, and the threads that generate them in batches.

Rows that may share a batch wait for each other for a few milliseconds. A batch runs until its last
row is finished, and takes in nobody on the way; each row's result leaves as soon as it is there.
Each thread runs one batch at a time. With one thread (the default) a long text makes all that come
later wait; with several they share the device.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import StoppingCriteriaList

from hf_specdec.modeling.placement import input_device
from hf_specdec.serving.rows import BatchMonitor, Row
from hf_specdec.serving.telemetry import Telemetry

logger = logging.getLogger(__name__)
# A batch's padded prompts may have this many times the tokens of the prompts themselves ...
_MOST_PADDING = 2
# ... plus this many a row: short prompts may always share a batch.
_FREE_PADDING = 64


class QueueFullError(RuntimeError):
    """There are more rows waiting than the engine was told to hold."""


@dataclass(frozen=True)
class BatchingLimits:
    """How rows are batched.

    Attributes:
        max_batch_size: most rows of a batch; 1 generates one row at a time.
        wait: seconds that rows wait for others to share their batch.
        max_waiting: most rows in the queue.
        max_positions: tokens of the longest row, prompt included; unlimited if ``None``.
        concurrent_batches: batches that run at the same time, each in a thread of its own.
    """

    max_batch_size: int = 16
    wait: float = 0.005
    max_waiting: int = 1024
    max_positions: int | None = None
    concurrent_batches: int = 1


class Engine:
    """Generates rows.

    Args:
        target: a model with an attached drafter.
        pad_token_id: fills the left of short prompts.
        limits: how rows are batched.
        telemetry: counts.
    """

    def __init__(
        self, target: Any, pad_token_id: int, limits: BatchingLimits, telemetry: Telemetry
    ):
        self._target = target
        self._pad_token_id = pad_token_id
        self._limits = limits
        self._telemetry = telemetry
        self.end_ids = end_ids(target)
        self._waiting: list[Row] = []
        # By thread.
        self._running: list[list[Row]] = [[] for _ in range(limits.concurrent_batches)]
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"engine-{i}", daemon=True)
            for i in range(limits.concurrent_batches)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel what is left and end the threads.

        Args:
            timeout: seconds to wait for them; a forward that takes longer is left alone.
        """
        with self._changed:
            self._stopping = True
            for row in (*self._waiting, *itertools.chain(*self._running)):
                row.cancelled = True
            for row in self._waiting:
                row.fail("cancelled")
            self._waiting = []
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    @property
    def is_alive(self) -> bool:
        """Whether rows that are submitted will be generated."""
        return all(t.is_alive() for t in self._threads) and not self._stopping

    @property
    def num_waiting(self) -> int:
        """Rows in the queue."""
        return sum(not row.cancelled for row in self._waiting)

    @property
    def max_waiting(self) -> int:
        """Most rows in the queue."""
        return self._limits.max_waiting

    @property
    def num_running(self) -> int:
        """Unfinished rows of the running batches."""
        return sum(row.finished is None for batch in self._running for row in batch)

    def submit(self, rows: Sequence[Row]) -> None:
        """Put rows in the queue.

        Raises:
            QueueFullError: they don't fit; none of them was taken.
        """
        with self._changed:
            # Nobody waits for those any more, though a running batch has yet to end.
            self._waiting = [row for row in self._waiting if not row.cancelled]
            if len(self._waiting) + len(rows) > self._limits.max_waiting:
                raise QueueFullError(f"{len(self._waiting)} texts are waiting already")
            self._waiting += rows
            self._changed.notify_all()

    def _work(self, index: int) -> None:
        while batch := self._next_batch(index):
            try:
                self._generate(batch)
            except Exception as error:
                logger.exception("a batch of %d failed", len(batch))
                for row in batch:
                    if row.finished is None:
                        row.fail(f"{type(error).__name__}: {error}")
            self._running[index] = []
            # Or the last batch would live until the next one comes.
            del batch

    def _next_batch(self, index: int) -> list[Row]:
        """Wait for rows, then a little for more of them; empty when there is nothing left to do."""
        with self._changed:
            free_since = time.monotonic()
            while True:
                self._waiting = [row for row in self._waiting if not row.cancelled]
                if self._stopping:
                    return []
                if not self._waiting:
                    self._changed.wait()
                    continue
                batch = self._compatible()
                # Rows whose batch has just ended are about to be followed by their clients' next.
                due = max(self._waiting[0].arrived, free_since) + self._limits.wait
                left = due - time.monotonic()
                if len(batch) == self._limits.max_batch_size or left <= 0:
                    taken = set(map(id, batch))
                    self._waiting = [row for row in self._waiting if id(row) not in taken]
                    # While the lock is held, or `stop` could miss them.
                    self._running[index] = batch
                    return batch
                self._changed.wait(left)

    def _compatible(self) -> list[Row]:
        """The oldest row, and those behind it that can share its batch."""
        batch: list[Row] = []
        for row in self._waiting:
            if len(batch) == self._limits.max_batch_size:
                break
            if not batch or (row.sampling == batch[0].sampling and self._fits([*batch, row])):
                batch.append(row)
        return batch

    def _fits(self, rows: Sequence[Row]) -> bool:
        """Whether the rows' lengths go together."""
        lengths = [len(row.prompt_ids) for row in rows]
        # Drafts of a row reach as far as the batch does, and a model has no position beyond this.
        longest = max(lengths) + max(row.max_new_tokens for row in rows)
        if self._limits.max_positions is not None and longest > self._limits.max_positions:
            return False
        padded = max(lengths) * len(lengths)
        return padded <= _MOST_PADDING * sum(lengths) + _FREE_PADDING * len(lengths)

    def _generate(self, rows: Sequence[Row]) -> None:
        now = time.monotonic()
        for row in rows:
            row.started = now
        width = max(len(row.prompt_ids) for row in rows)
        input_ids = torch.full((len(rows), width), self._pad_token_id)
        mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask[i, width - len(row.prompt_ids) :] = 1
        sampling = rows[0].sampling
        config = sampling.generation_config(
            self._target.generation_config, max(row.max_new_tokens for row in rows)
        )
        config.pad_token_id = self._pad_token_id
        monitor = BatchMonitor(rows, self.end_ids, self._telemetry.row_finished)
        self._telemetry.batch_started(len(rows))
        device = input_device(self._target)
        self._target.generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            logits_processor=sampling.processors(width),
            stopping_criteria=StoppingCriteriaList([monitor]),
            streamer=monitor,
            row_seeds=[row.seed for row in rows],
        )


def end_ids(target: Any) -> frozenset[int]:
    """The end-of-sequence ids of a model."""
    ids = target.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
