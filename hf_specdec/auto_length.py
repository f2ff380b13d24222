"""``num_assistant_tokens="auto"``: K chosen while generating, from what steps cost and bring.

A step that drafts K tokens brings 1 + a_1 + a_1 a_2 + ... + a_1..a_K tokens, where a_k is the
share of drafts accepted at position k among those that reached it, and takes as long as is
measured. The K with the most tokens a second is used; 0, plain decoding, is one of the choices. Now
and then another K is tried, because texts change and because a drafter that isn't asked can't show
that it is right.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from hf_specdec.schedule import DraftLength

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


class Measurements:
    """What steps of one drafter cost and bring; kept from call to call."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, deque[float]]] = defaultdict(dict)
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self.chosen: dict[int, int] = {}

    def record(self, size: int, num_draft_tokens: int, accepted: Sequence[int], seconds: float):
        """Count one step: its size of batch, K, accepted drafts of each row, and time."""
        times = self._seconds[size].setdefault(num_draft_tokens, deque(maxlen=_REMEMBERED))
        times.append(seconds)
        missing = num_draft_tokens - len(self._reached)
        self._reached += [0.0] * missing
        self._accepted += [0.0] * missing
        for k in range(num_draft_tokens):
            self._reached[k] *= _DECAY
            self._accepted[k] *= _DECAY
            self._reached[k] += sum(n >= k for n in accepted) / len(accepted)
            self._accepted[k] += sum(n > k for n in accepted) / len(accepted)

    def is_measured(self, size: int, num_draft_tokens: int) -> bool:
        """Whether the time of such a step is known well enough."""
        return len(self._seconds[size].get(num_draft_tokens, ())) >= _ENOUGH

    def tokens(self, num_draft_tokens: int) -> float:
        """Tokens a row gets from a step; positions never tried count as the one before them."""
        total = reach = rate = 1.0
        for k in range(num_draft_tokens):
            if k < len(self._reached) and self._reached[k] > 0.1:
                rate = self._accepted[k] / self._reached[k]
            reach *= rate
            total += reach
        return total

    def seconds(self, size: int, num_draft_tokens: int) -> float:
        """Time of a step; on the line through the shortest and longest K measured if untried."""
        known = self._seconds[size]
        if num_draft_tokens in known:
            return median(known[num_draft_tokens])
        low, high = min(known), max(known)
        start, end = median(known[low]), median(known[high])
        slope = (end - start) / (high - low) if high > low else 0.0
        return max(start + slope * (num_draft_tokens - low), 1e-9)

    def rate(self, size: int, num_draft_tokens: int) -> float:
        """Tokens a second of a row."""
        return self.tokens(num_draft_tokens) / self.seconds(size, num_draft_tokens)


@dataclass
class AutoDraftLength(DraftLength):
    """Chooses K before every step; see the module.

    Attributes:
        measurements: of this drafter, from earlier calls too.
        choices: the K there are, 0 among them, in order.
        clock: seconds.
    """

    measurements: Measurements = field(default_factory=Measurements)
    choices: Sequence[int] = (0,)
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        super().__post_init__()
        self._began = 0.0
        self._wait = _SHORTEST_WAIT
        self._until_trial = _SHORTEST_WAIT
        self._tried_plain = False
        self._size = 0

    @property
    def limit(self) -> int:
        """No step drafts more than this."""
        return max(self.choices)

    def next(self, num_rows: int) -> int:
        """K for a step over ``num_rows`` active rows."""
        # Batches of 4 to 7 rows cost much the same; of each size alone too little would be seen.
        self._size = num_rows.bit_length()
        self.current = max(self.choices)
        most = super().next(num_rows)
        allowed = [k for k in self.choices if k <= most]
        self.current = self._choose(allowed)
        self._began = self.clock()
        return self.current

    def update(self, num_draft_tokens: int, accepted: Sequence[int]) -> None:
        """Learn from a step: K, and how many drafts each row accepted."""
        elapsed = self.clock() - self._began
        self.measurements.record(self._size, num_draft_tokens, accepted, elapsed)

    def _choose(self, allowed: Sequence[int]) -> int:
        measured, size = self.measurements, self._size
        for k in (min(self.initial, allowed[-1]), 0):
            if k in allowed and not measured.is_measured(size, k):
                return k
        best = max(allowed, key=lambda k: measured.rate(size, k))
        before = measured.chosen.get(size)
        if before is not None and before in allowed:
            gain = measured.rate(size, best) / measured.rate(size, before)
            best = best if gain > _MARGIN else before
        if best != before:
            measured.chosen[size] = best
            self._wait = self._until_trial = _SHORTEST_WAIT
        if not measured.is_measured(size, best):
            return best
        self._until_trial -= 1
        if self._until_trial > 0 or len(allowed) == 1:
            return best
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._until_trial = self._wait
        return self._trial(best, allowed)

    def _trial(self, best: int, allowed: Sequence[int]) -> int:
        """Another K: plain decoding and the most promising other one, in turns."""
        others = [k for k in allowed if k not in (best, 0)]
        self._tried_plain = not self._tried_plain
        if best and (self._tried_plain or not others):
            return 0
        return max(others, key=lambda k: self.measurements.rate(self._size, k))
