"""Acceptance statistics, with vLLM's definitions.

A *draft* is one proposal of up to K tokens for one row, verified by one target forward. Accepted
tokens don't include the bonus token that the target adds, so

    acceptance rate         = accepted tokens / draft tokens
    mean acceptance length  = 1 + accepted tokens / drafts     (tokens emitted per draft)
    rate at position k      = drafts whose k-th token was accepted / drafts
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass
class SpeculationStats:
    """What speculation did in one ``generate`` call, or in several added up (``a + b``).

    Attributes:
        num_drafts: proposals, counted per row.
        num_draft_tokens: proposed tokens.
        num_accepted_tokens: proposed tokens that were emitted; bonus tokens aren't counted.
        accepted_per_position: how often the token at draft position k was accepted.
        num_target_forwards: forwards of the target, the prefill included.
        num_new_tokens: tokens emitted, over all rows.
        rows: one record per row for a single call, empty for a row's own record and for sums.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    num_new_tokens: int = 0
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
        longest = max(len(self.accepted_per_position), len(other.accepted_per_position))
        padded = [
            list(s.accepted_per_position) + [0] * (longest - len(s.accepted_per_position))
            for s in (self, other)
        ]
        return SpeculationStats(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            accepted_per_position=[a + b for a, b in zip(*padded, strict=True)],
            num_target_forwards=self.num_target_forwards + other.num_target_forwards,
            num_new_tokens=self.num_new_tokens + other.num_new_tokens,
        )

    def __str__(self) -> str:
        positions = ", ".join(f"{rate:.3f}" for rate in self.per_position)
        return (
            f"Mean acceptance length: {self.mean_acceptance_length:.2f}, "
            f"acceptance rate: {100 * self.acceptance_rate:.1f}%, "
            f"accepted: {self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens "
            f"in {self.num_drafts} drafts, per position: {positions or '-'}"
        )


class StatsRecorder:
    """Collects one call's steps; all arithmetic is left for the end, off the hot path."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._rows: list[torch.Tensor] = []
        self._accepted: list[torch.Tensor] = []
        self._drafted: list[int] = []
        self._num_target_forwards = 0

    def record_step(
        self, rows: torch.Tensor, accepted: torch.Tensor, num_draft_tokens: int
    ) -> None:
        """Count one verification.

        Args:
            rows: int64 ``[n]`` on CPU, the caller's indices of the active rows.
            accepted: int64 ``[n]`` on CPU, draft tokens emitted for each of them.
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
            rows = torch.cat(self._rows)
            accepted = torch.cat(self._accepted)
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
        total = sum(records, SpeculationStats())
        total.num_target_forwards = self._num_target_forwards
        total.rows = records
        return total
