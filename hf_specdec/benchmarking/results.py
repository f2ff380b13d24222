"""What a benchmark found: plain numbers that can be written to JSON and read again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_specdec.agreement import Difference
from hf_specdec.benchmarking.clock import Sections
from hf_specdec.metrics import SpeculationStats
from hf_specdec.options.schedule import AUTO, NumDraftTokens


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing: their median and their range."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        middle = len(ordered) // 2
        median = (ordered[middle] + ordered[~middle]) / 2
        return cls(median, ordered[0], ordered[-1])


@dataclass(frozen=True)
class Disagreement:
    """A prompt whose two texts differ.

    Attributes:
        prompt: its number in its set, from 1.
        position: how many new tokens agree.
        gap: how far the worse of the two tokens there is below the target's best logit.
        rounding: how far two ways to compute these logits disagree.
        near_tie: the difference is a rounding matter; otherwise it is an error.
    """

    prompt: int
    position: int
    gap: float
    rounding: float
    near_tie: bool

    @classmethod
    def of(cls, prompt: int, difference: Difference) -> Disagreement:
        """The difference of a prompt's texts."""
        return cls(
            prompt, difference.position, difference.gap, difference.rounding, difference.near_tie
        )


@dataclass(frozen=True)
class Drafting:
    """How a step drafts: K, and the nodes of the tree (0: a chain)."""

    k: NumDraftTokens
    tree_nodes: int = 0

    def __str__(self) -> str:
        return f"{self.k}, tree of {self.tree_nodes}" if self.tree_nodes else str(self.k)


@dataclass(frozen=True)
class Row:
    """One combination of prompt set, batch size and K.

    Attributes:
        prompt_set: the set's name.
        batch: rows of a batch.
        k: draft tokens a step, or ``"auto"``.
        tree_nodes: drafts of the tree that a step verifies; 0: a chain.
        plain_tokens_per_second, speculative_tokens_per_second: medians, the prompt's forward
            included.
        speedup: of the pairs of runs, ratios of tokens per second.
        num_drafts: proposals, counted per row.
        acceptance_rate: accepted of the drafted tokens.
        per_position: share of the drafts that were accepted up to each position.
        mean_acceptance_length: tokens emitted per draft, the target's own included.
        plain_first_token, speculative_first_token: median seconds of a call for one token.
        target_share, drafter_share, loop_share: parts of the profiled speculative calls' time.
        target_step, drafter_step, loop_step: milliseconds of the same for each step behind the
            prompt's; what drafter and loop do once a call is spread over the steps.
        plain_peak, speculative_peak: bytes, the largest over the timed runs; ``None`` if unknown.
        texts: pairs of texts that were compared.
        disagreements: those that differ.
    """

    prompt_set: str
    batch: int
    k: NumDraftTokens
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speedup: Spread
    num_drafts: int
    acceptance_rate: float
    per_position: list[float]
    mean_acceptance_length: float
    plain_first_token: float
    speculative_first_token: float
    target_share: float
    drafter_share: float
    loop_share: float
    target_step: float
    drafter_step: float
    loop_step: float
    plain_peak: int | None
    speculative_peak: int | None
    texts: int
    disagreements: list[Disagreement] = field(default_factory=list)
    tree_nodes: int = 0

    @property
    def drafting(self) -> Drafting:
        """K and the tree."""
        return Drafting(self.k, self.tree_nodes)

    @property
    def near_ties(self) -> int:
        """Texts that part at a near-tie."""
        return sum(found.near_tie for found in self.disagreements)

    @property
    def wrong(self) -> int:
        """Texts that part for no good reason."""
        return len(self.disagreements) - self.near_ties

    @property
    def identical(self) -> int:
        """Texts that are equal."""
        return self.texts - len(self.disagreements)


@dataclass(frozen=True)
class Report:
    """A whole benchmark.

    Attributes:
        environment: models, machine and versions.
        settings: what was asked for.
        rows: see `Row`.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]

    @property
    def wrong(self) -> int:
        """Wrong texts in all rows."""
        return sum(row.wrong for row in self.rows)

    def write(self, path: Path) -> None:
        """Write it as JSON, the counts of each row included."""
        rows = [
            asdict(row)
            | {"identical": row.identical, "near_ties": row.near_ties, "wrong": row.wrong}
            for row in self.rows
        ]
        content = {"environment": self.environment, "settings": self.settings, "rows": rows}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass
class RowRecord:
    """Collects the measurements of one row while they are made."""

    prompt_set: str
    batch: int
    k: NumDraftTokens
    tree_nodes: int = 0
    plain_seconds: list[float] = field(default_factory=list)
    speculative_seconds: list[float] = field(default_factory=list)
    plain_first: list[float] = field(default_factory=list)
    speculative_first: list[float] = field(default_factory=list)
    sections: Sections = field(default_factory=Sections)
    plain_peaks: list[int | None] = field(default_factory=list)
    speculative_peaks: list[int | None] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    texts: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)

    def finish(self) -> Row:
        """The row; the seconds that were collected are per token."""
        pairs = zip(self.plain_seconds, self.speculative_seconds, strict=True)
        parts = self.sections
        per_step = 1000 / max(parts.steps, 1)
        return Row(
            prompt_set=self.prompt_set,
            batch=self.batch,
            k=self.k,
            plain_tokens_per_second=1 / Spread.of(self.plain_seconds).median,
            speculative_tokens_per_second=1 / Spread.of(self.speculative_seconds).median,
            speedup=Spread.of([plain / ours for plain, ours in pairs]),
            num_drafts=self.stats.num_drafts,
            acceptance_rate=self.stats.acceptance_rate,
            per_position=self.stats.per_position,
            mean_acceptance_length=self.stats.mean_acceptance_length,
            plain_first_token=Spread.of(self.plain_first).median,
            speculative_first_token=Spread.of(self.speculative_first).median,
            target_share=parts.target / parts.total,
            drafter_share=parts.drafter / parts.total,
            loop_share=parts.loop / parts.total,
            target_step=parts.verification * per_step,
            drafter_step=parts.drafter * per_step,
            loop_step=parts.loop * per_step,
            plain_peak=_largest(self.plain_peaks),
            speculative_peak=_largest(self.speculative_peaks),
            texts=self.texts,
            disagreements=self.disagreements,
            tree_nodes=self.tree_nodes,
        )


def in_order(draftings: Iterable[Drafting]) -> list[Drafting]:
    """Each way of drafting once: chains first, and ``"auto"`` behind the numbers."""
    return sorted(
        set(draftings), key=lambda d: (d.tree_nodes, d.k == AUTO, d.k if d.k != AUTO else 0)
    )


def _largest(peaks: Sequence[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return max(known, default=None)
