"""How many tokens the next step drafts: by batch size, and by how the last drafts went.

All of it changes speed alone; the output does not depend on K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

BatchSizeSchedule = Sequence[Sequence[int]]
"""``[[start, end, K], ...]``: K for batches of start to end rows, as in vLLM."""
DraftLengthSchedule = Literal["constant", "heuristic", "heuristic_transient"]
AUTO: Final = "auto"
"""Asked for in place of a K: `auto_length` chooses it while generating."""
MOST_AUTO = 4
"""How far that goes where a drafter has no limit of its own."""
NumDraftTokens = int | Literal["auto"]


@dataclass
class DraftLength:
    """Decides K before every step.

    Attributes:
        initial: K of the first step.
        most: the drafter's limit.
        per_batch_size: upper limits by the number of rows still active; see `check_per_batch_size`.
        schedule: ``"constant"``, or transformers' heuristic: two more after a step whose drafts
            were all accepted, one less after any other, at least 1. With several rows, two more if
            at least half of them accepted everything.
    """

    initial: int
    most: int
    per_batch_size: BatchSizeSchedule | None = None
    schedule: DraftLengthSchedule | Literal["auto"] = "constant"

    def __post_init__(self) -> None:
        self.current = self.initial

    @property
    def limit(self) -> int:
        """No step drafts more than this."""
        return self.initial if self.schedule == "constant" else max(self.initial, self.most)

    @property
    def drafts_tree(self) -> bool:
        """Whether the step that `next` was asked about drafts a tree, where there are trees."""
        return True

    def next(self, num_rows: int, most: int) -> int:
        """K for a step over ``num_rows`` active rows, at most ``most``."""
        return self.allowed(num_rows, min(self.current, most))

    def allowed(self, num_rows: int, most: int) -> int:
        """``most``, or less where the batch's size limits it."""
        if self.per_batch_size is None:
            return most
        allowed = self.per_batch_size[0][2]
        for start, _, k in self.per_batch_size:
            if num_rows >= start:
                allowed = k
        return min(most, allowed)

    def update(
        self, num_draft_tokens: int, accepted: Sequence[int], rows: Sequence[int] | None = None
    ) -> None:
        """Learn from a step.

        Args:
            num_draft_tokens: K.
            accepted: drafts of each active row.
            rows: their indices in the whole batch; 0, 1, ... if not given.
        """
        if self.schedule == "constant" or num_draft_tokens == 0:
            return
        complete = sum(n == num_draft_tokens for n in accepted)
        if 2 * complete >= len(accepted):
            self.current = min(self.current + 2, self.most)
        else:
            self.current = max(self.current - 1, 1)


def check_schedule(value: Any) -> DraftLengthSchedule:
    """Raise ValueError unless ``value`` names a schedule."""
    if value not in get_args(DraftLengthSchedule):
        raise ValueError(
            f"num_assistant_tokens_schedule={value!r} is not known; choose from "
            f"{list(get_args(DraftLengthSchedule))}"
        )
    return value


def check_confidence_threshold(value: Any) -> float:
    """The least probability of a draft token after which drafting goes on.

    Raises:
        ValueError: not a number from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(
            f"assistant_confidence_threshold={value!r} must be a number from 0 to 1 "
            "(0 never stops drafting early)"
        )
    return float(value)


def check_per_batch_size(value: Any) -> BatchSizeSchedule:
    """Check a schedule of K by batch size by vLLM's rules.

    Sizes in a gap keep the K before it, sizes beyond the last range keep the last K, and K never
    exceeds the call's own.

    Raises:
        ValueError: empty; not triples of integers; a range that is reversed, overlaps the one
            before it or begins below 1; a first range that doesn't begin at 1; a negative K.
    """
    name = f"num_speculative_tokens_per_batch_size={value!r}"
    shape = "a list of [start, end, K], such as [[1, 4, 3], [5, 64, 1]]"
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name} must be {shape}")
    previous_end = 0
    for entry in value:
        if (
            not isinstance(entry, (list, tuple))
            or len(entry) != 3
            or any(isinstance(n, bool) or not isinstance(n, int) for n in entry)
        ):
            raise ValueError(f"{name}: {entry!r} is not three integers; it must be {shape}")
        start, end, k = entry
        if start < 1 or end < start or k < 0:
            raise ValueError(f"{name}: {entry!r} must have 1 <= start <= end and K of at least 0")
        if start <= previous_end:
            raise ValueError(
                f"{name}: {entry!r} overlaps the range before it; ranges must be in order"
            )
        if previous_end == 0 and start != 1:
            raise ValueError(f"{name}: the first range must begin at 1, not at {start}")
        previous_end = end
    return value
