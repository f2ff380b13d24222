"""Acceptance statistics, with vLLM's definitions.

A *draft* is one proposal of up to K tokens for one row, verified by one target forward. Accepted
tokens don't include the bonus token that the target adds, so

    acceptance rate         = accepted tokens / draft tokens
    mean acceptance length  = 1 + accepted tokens / drafts     (tokens emitted per draft)
    rate at position k      = drafts whose k-th token was accepted / drafts
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch


@dataclass
class SpeculationStats:
    """What speculation did in a ``generate`` call, or in several: ``a + b``, ``later - earlier``.

    Attributes:
        num_drafts: proposals, counted per row.
        num_draft_tokens: proposed tokens.
        num_accepted_tokens: proposed tokens that were emitted; bonus tokens aren't counted.
        accepted_per_position: how often the token at draft position k was accepted.
        num_target_forwards: forwards of the target, the prefill included.
        num_new_tokens: tokens emitted, over all rows.
        num_tree_nodes: drafts that were verified in trees, counted per row. Of a tree only its
            depth counts as ``num_draft_tokens``: the most that could be accepted.
        rows: one record per row for a single call, empty for a row's own record and for sums.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    num_new_tokens: int = 0
    num_tree_nodes: int = 0
    rows: list[SpeculationStats] = field(default_factory=list, repr=False)

    @classmethod
    def of_step(
        cls, num_new_tokens: int, num_draft_tokens: int, num_accepted_tokens: int
    ) -> SpeculationStats:
        """What one step did for one row (see `streaming.RowStep`)."""
        positions = range(num_draft_tokens)
        return cls(
            num_drafts=int(num_draft_tokens > 0),
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            accepted_per_position=[int(num_accepted_tokens > k) for k in positions],
            num_target_forwards=1,
            num_new_tokens=num_new_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted (0 without drafts)."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, the bonus token included (1 without drafts)."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def per_position(self) -> list[float]:
        """Share of the drafts whose token at position k was accepted, for every k."""
        return [n / self.num_drafts if self.num_drafts else 0.0 for n in self.accepted_per_position]

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return self._combine(other, 1)

    def __sub__(self, other: SpeculationStats) -> SpeculationStats:
        return self._combine(other, -1)

    def _combine(self, other: SpeculationStats, sign: int) -> SpeculationStats:
        positions = zip_longest(
            self.accepted_per_position, other.accepted_per_position, fillvalue=0
        )
        return SpeculationStats(
            num_drafts=self.num_drafts + sign * other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + sign * other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + sign * other.num_accepted_tokens,
            accepted_per_position=[a + sign * b for a, b in positions],
            num_target_forwards=self.num_target_forwards + sign * other.num_target_forwards,
            num_new_tokens=self.num_new_tokens + sign * other.num_new_tokens,
            num_tree_nodes=self.num_tree_nodes + sign * other.num_tree_nodes,
        )

    def as_dict(self) -> dict[str, Any]:
        """Counts and rates for JSON, without ``rows``."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_position": list(self.accepted_per_position),
            "num_target_forwards": self.num_target_forwards,
            "num_new_tokens": self.num_new_tokens,
            "num_tree_nodes": self.num_tree_nodes,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
        }

    def __str__(self) -> str:
        positions = ", ".join(f"{rate:.3f}" for rate in self.per_position)
        return (
            f"Mean acceptance length: {self.mean_acceptance_length:.2f}, "
            f"acceptance rate: {100 * self.acceptance_rate:.1f}%, "
            f"accepted: {self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens "
            f"in {self.num_drafts} drafts, per position: {positions or '-'}"
        )


class SpeculationTotals:
    """What speculation did over many calls, in any number of threads.

    An attached target has one (`hf_specdec.speculation_totals`). Counts grow until `reset`, as
    Prometheus counters do; a log line is about the time since the one before.

    Args:
        clock: seconds, monotonic; another one in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._total = SpeculationStats()
        self._logged = SpeculationStats()
        self._logged_at = clock()

    def add(self, stats: SpeculationStats) -> None:
        """Count one call."""
        with self._lock:
            self._total = self._total + stats

    def snapshot(self) -> SpeculationStats:
        """The counts so far: a copy, without ``rows``."""
        with self._lock:
            return deepcopy(self._total)

    def reset(self) -> SpeculationStats:
        """Start from zero again, log lines included; returns the counts until here."""
        with self._lock:
            total, self._total = self._total, SpeculationStats()
            self._logged = SpeculationStats()
            self._logged_at = self._clock()
            return total

    def log_line(self) -> str:
        """One line in vLLM's words about the calls since the last one, or since the start.

        Throughputs are tokens per second of the time that passed, idle time included.
        """
        with self._lock:
            now = self._clock()
            seconds, stats = now - self._logged_at, self._total - self._logged
            self._logged, self._logged_at = self._total, now
        return log_line(stats, seconds)

    def __getstate__(self) -> dict[str, Any]:
        # A target is copied and pickled with what is attached to it; a lock can't be.
        with self._lock:
            return {"total": deepcopy(self._total)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._total = self._logged = state["total"]


def log_line(stats: SpeculationStats, seconds: float) -> str:
    """One line in vLLM's words.

    Args:
        stats: what was counted.
        seconds: in how long, for the throughputs (0 without time passed).
    """
    accepted, drafted = (
        count / seconds if seconds > 0 else 0.0
        for count in (stats.num_accepted_tokens, stats.num_draft_tokens)
    )
    positions = ", ".join(f"{rate:.3f}" for rate in stats.per_position)
    return (
        "SpecDecoding metrics: "
        f"Mean acceptance length: {stats.mean_acceptance_length:.2f}, "
        f"Accepted throughput: {accepted:.2f} tokens/s, "
        f"Drafted throughput: {drafted:.2f} tokens/s, "
        f"Accepted: {stats.num_accepted_tokens} tokens, "
        f"Drafted: {stats.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {positions}, "
        f"Avg Draft acceptance rate: {100 * stats.acceptance_rate:.1f}%"
    )


class StatsRecorder:
    """Collects one call's steps; all arithmetic is left for the end, off the hot path."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._rows: list[Sequence[int]] = []
        self._accepted: list[Sequence[int]] = []
        self._drafted: list[int] = []
        self._num_target_forwards = 0
        self._trees: list[tuple[Iterable[int], int]] = []

    def record_tree(self, rows: Iterable[int], num_nodes: int) -> None:
        """Count the nodes of a verified tree for each active row, besides `record_step`."""
        self._trees.append((rows, num_nodes))

    def record_step(
        self, rows: Sequence[int], accepted: Sequence[int], num_draft_tokens: int
    ) -> None:
        """Count one verification.

        Args:
            rows: the caller's indices of the active rows; not changed afterwards.
            accepted: draft tokens emitted for each of them.
            num_draft_tokens: K of this step; 0 for the prefill and for plain steps.
        """
        self._num_target_forwards += 1
        if num_draft_tokens:
            self._rows.append(rows)
            self._accepted.append(accepted)
            self._drafted.append(num_draft_tokens)

    def finish(self, num_new_tokens: Iterable[int]) -> SpeculationStats:
        """Sum up.

        Args:
            num_new_tokens: tokens emitted for each row.
        """
        longest = max(self._drafted, default=0)
        records = [SpeculationStats(num_new_tokens=n) for n in num_new_tokens]
        if self._rows:
            rows = torch.tensor([row for step in self._rows for row in step])
            accepted = torch.tensor([count for step in self._accepted for count in step])
            drafted = torch.tensor(self._drafted).repeat_interleave(
                torch.tensor([len(r) for r in self._rows])
            )
            reached = (accepted[:, None] > torch.arange(longest)).long()
            per_position = torch.zeros(self._num_rows, longest, dtype=torch.long)
            per_position.index_add_(0, rows, reached)
            drafts = rows.bincount(minlength=self._num_rows).tolist()
            draft_tokens = torch.zeros(self._num_rows, dtype=torch.long)
            draft_tokens.index_add_(0, rows, drafted)
            for b, record in enumerate(records):
                record.num_drafts = drafts[b]
                record.num_draft_tokens = int(draft_tokens[b])
                record.accepted_per_position = per_position[b].tolist()
                record.num_accepted_tokens = sum(record.accepted_per_position)
        for active, num_nodes in self._trees:
            for row in active:
                records[row].num_tree_nodes += num_nodes
        total = sum(records, SpeculationStats())
        total.num_target_forwards = self._num_target_forwards
        total.rows = records
        return total
