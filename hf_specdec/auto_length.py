"""``num_assistant_tokens="auto"``: K chosen while generating, from what steps cost and bring.

A step that drafts K tokens brings 1 + a_1 + a_1 a_2 + ... + a_1..a_K tokens, where a_k is the
share of drafts accepted at position k among those that reached it, and takes as long as is
measured. A batch is over when its slowest row is, so that of the drafts' gain only the slowest
row's share counts. The K with the most tokens a second is used; 0, plain decoding, is one of the
choices. Now and then another K is tried, because texts change and because a drafter that isn't
asked can't show that it is right.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from hf_specdec.options.schedule import DraftLength

TREE: Final = 1_000
"""The choice to draft a tree of N nodes is this number + N."""
# Steps of each K and size of the batch that are remembered: enough for a median to shrug off a
# hiccup, few enough to follow a context that grows.
_REMEMBERED = 7
# A time counts once it was measured this often.
_ENOUGH = 2
# Weight that drafts keep with every newer step: the last 20 or so count.
_DECAY = 0.95
# Steps between two trials of another K; doubled while they change nothing.
_SHORTEST_WAIT, _LONGEST_WAIT = 16, 128
# Gain a change of K must promise, so that noise doesn't decide.
_MARGIN = 1.02
# Steps after which a row's share of accepted drafts is taken for its own, and not for chance; and
# the slowest row's share before anything is known about rows.
_LONG, _SLOWEST = 64, 0.8


@dataclass
class Trials:
    """When another K is tried next, for one size of the batch.

    Attributes:
        wait: steps between two trials.
        left: steps until the next one.
        count: trials so far.
    """

    wait: int = _SHORTEST_WAIT
    left: int = _SHORTEST_WAIT
    count: int = 0


class Measurements:
    """What steps of one drafter cost and bring; kept from call to call.

    Attributes:
        lock: to be held around every use: calls in several threads may share a drafter.
        chosen: by size of the batch, the K in use.
        trials: by size of the batch. Kept too, or short calls would never try anything.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.trials: dict[int, Trials] = defaultdict(Trials)
        self._num_steps = 0
        self._last_step: dict[int, dict[int, int]] = defaultdict(dict)
        self._seconds: dict[int, dict[int, deque[float]]] = defaultdict(dict)
        # Of chains, and of trees.
        self._reached: tuple[list[float], list[float]] = ([], [])
        self._accepted: tuple[list[float], list[float]] = ([], [])
        self.chosen: dict[int, int] = {}
        self._slowest: dict[int, float] = {}

    def record_rows(self, size: int, accepted: Sequence[int], steps: int) -> None:
        """Learn how far the slowest row of a batch falls behind.

        Args:
            size: of the batch.
            accepted: drafts of each active row in this call.
            steps: that drafted.
        """
        mean = sum(accepted) / len(accepted)
        if len(accepted) == 1 or mean == 0:
            return
        # By chance alone rows differ, the less so the longer they are.
        behind = (1 - min(accepted) / mean) * min(1.0, steps / _LONG) ** 0.5
        before = self._slowest.get(size, _SLOWEST)
        self._slowest[size] = _DECAY * before + (1 - _DECAY) * (1 - behind)

    def record(
        self, size: int, choice: int, accepted: Sequence[int], seconds: float, depth: int = 0
    ):
        """Count one step.

        Args:
            size: of the batch.
            choice: K, or `TREE` + N.
            accepted: drafts of each row.
            seconds: what it took.
            depth: of the tree.
        """
        times = self._seconds[size].setdefault(choice, deque(maxlen=_REMEMBERED))
        times.append(seconds)
        self._num_steps += 1
        self._last_step[size][choice] = self._num_steps
        num_draft_tokens = depth if choice >= TREE else choice
        all_reached, all_accepted = self._counts(choice)
        missing = num_draft_tokens - len(all_reached)
        all_reached += [0.0] * missing
        all_accepted += [0.0] * missing
        # Trees that became shallower reach the depths beyond, and nothing is accepted there.
        for k in range(len(all_reached) if choice >= TREE else num_draft_tokens):
            all_reached[k] *= _DECAY
            all_accepted[k] *= _DECAY
            all_reached[k] += sum(n >= k for n in accepted) / len(accepted)
            all_accepted[k] += sum(n > k for n in accepted) / len(accepted)

    def _counts(self, choice: int) -> tuple[list[float], list[float]]:
        """Drafts that were reached and accepted by position: of chains, or of trees."""
        return self._reached[choice >= TREE], self._accepted[choice >= TREE]

    def is_measured(self, size: int, num_draft_tokens: int) -> bool:
        """Whether the time of such a step is known well enough."""
        return len(self._seconds[size].get(num_draft_tokens, ())) >= _ENOUGH

    def last_step(self, size: int, num_draft_tokens: int) -> int:
        """The number of the last such step, 0 if there was none."""
        return self._last_step[size].get(num_draft_tokens, 0)

    def tokens(self, choice: int) -> float:
        """Tokens a row gets from a step; positions never tried count as the one before them.

        A tree that was never tried brings what the longest chain does.
        """
        reached, accepted = self._counts(choice)
        if choice >= TREE and not reached:
            reached, accepted = self._counts(0)
        total = reach = rate = 1.0
        for k in range(len(reached) if choice >= TREE else choice):
            if k < len(reached) and reached[k] > 0.1:
                rate = accepted[k] / reached[k]
            reach *= rate
            total += reach
        return total

    def seconds(self, size: int, num_draft_tokens: int) -> float:
        """Time of a step; on the line through the shortest and longest K measured if untried."""
        known = self._seconds[size]
        if num_draft_tokens in known:
            # Not 0, whatever the clock's resolution.
            return max(median(known[num_draft_tokens]), 1e-9)
        chains = [k for k in known if k < TREE]
        low, high = min(chains), max(chains)
        num_draft_tokens %= TREE
        start, end = median(known[low]), median(known[high])
        slope = (end - start) / (high - low) if high > low else 0.0
        return max(start + slope * (num_draft_tokens - low), 1e-9)

    def rate(self, size: int, num_draft_tokens: int) -> float:
        """Tokens a second of the slowest row."""
        # Sizes are counted in powers of two; 1 is one row.
        share = self._slowest.get(size, _SLOWEST) if size > 1 else 1.0
        tokens = 1.0 + share * (self.tokens(num_draft_tokens) - 1.0)
        return tokens / self.seconds(size, num_draft_tokens)


@dataclass
class AutoDraftLength(DraftLength):
    """Chooses K before every step; see the module.

    Attributes:
        measurements: of this drafter, from earlier calls too.
        choices: the K there are, 0 among them, in order, and `TREE` + N where there are trees.
        clock: seconds.
        agree: makes several ranks use the choice of one of them.
    """

    measurements: Measurements = field(default_factory=Measurements)
    choices: Sequence[int] = (0,)
    clock: Callable[[], float] = time.perf_counter
    agree: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._began = 0.0
        self._size = 0
        # By row, drafts accepted in this call; and the steps that drafted.
        self._of_rows: dict[int, int] = {}
        self._steps = 0

    @property
    def limit(self) -> int:
        """No step drafts more than this."""
        return max(k for k in self.choices if k < TREE)

    @property
    def drafts_tree(self) -> bool:
        """Whether the step that `next` was asked about drafts a tree."""
        return self.current >= TREE

    def next(self, num_rows: int, most: int) -> int:
        """K for a step over ``num_rows`` active rows, at most ``most``."""
        # Batches of 4 to 7 rows cost much the same; of each size alone too little would be seen.
        self._size = num_rows.bit_length()
        self.current = self.limit
        most = super().next(num_rows, most)
        allowed = [k for k in self.choices if k <= most or (k >= TREE and most)]
        with self.measurements.lock:
            self.current = self._choose(allowed)
        if self.agree is not None:
            self.current = self.agree(self.current)
        self._began = self.clock()
        return most if self.drafts_tree else self.current

    def update(
        self, num_draft_tokens: int, accepted: Sequence[int], rows: Sequence[int] | None = None
    ) -> None:
        """Learn from a step: how many drafts each row accepted of those that `next` asked for.

        ``num_draft_tokens`` may be fewer, where a drafter was not sure enough to go on. What was
        asked for counts, as that is what is chosen.
        """
        elapsed = self.clock() - self._began
        with self.measurements.lock:
            self.measurements.record(self._size, self.current, accepted, elapsed, num_draft_tokens)
            if self.current:
                rows = range(len(accepted)) if rows is None else rows
                for row, count in zip(rows, accepted, strict=True):
                    self._of_rows[row] = self._of_rows.get(row, 0) + count
                self._steps += 1
                active = [self._of_rows[row] for row in rows]
                self.measurements.record_rows(self._size, active, self._steps)

    def _choose(self, allowed: Sequence[int]) -> int:
        measured, size = self.measurements, self._size
        longest = max(k for k in allowed if k < TREE)
        for k in (min(self.initial, longest), 0, *(k for k in allowed if k >= TREE)):
            if k in allowed and not measured.is_measured(size, k):
                return k
        best = max(allowed, key=lambda k: measured.rate(size, k))
        before = measured.chosen.get(size)
        if before is not None and before in allowed:
            gain = measured.rate(size, best) / measured.rate(size, before)
            best = best if gain > _MARGIN else before
        trials = measured.trials[size]
        if best != before:
            measured.chosen[size] = best
            trials.wait = trials.left = _SHORTEST_WAIT
        if not measured.is_measured(size, best):
            return best
        trials.left -= 1
        if trials.left > 0 or len(allowed) == 1:
            return best
        trials.wait = min(2 * trials.wait, _LONGEST_WAIT)
        trials.left = trials.wait
        trials.count += 1
        return self._trial(best, allowed, trials.count)

    def _trial(self, best: int, allowed: Sequence[int], number: int) -> int:
        """Another K, in turns: plain decoding, the most promising one, the one longest untried.

        The last is there because a K that was measured in a bad moment promises nothing.
        """
        others = [k for k in allowed if k not in (best, 0)]
        turn = number % 3 if best else 1 + number % 2
        if not others or turn == 0:
            return 0
        if turn == 1:
            return max(others, key=lambda k: self.measurements.rate(self._size, k))
        return min(others, key=lambda k: self.measurements.last_step(self._size, k))
