"""``num_assistant_tokens="auto"``: K chosen while generating, from what steps cost and bring.

A step that drafts K tokens brings 1 + a_1 + a_1 a_2 + ... + a_1..a_K tokens, where a_k is the
share of drafts accepted at position k among those that reached it, and takes as long as is
measured. The K with the most tokens a second is used; 0, plain decoding, is one of the choices. Now
and then another K is tried, because texts change and because a drafter that isn't asked can't show
that it is right.
"""

from __future__ import annotations

import threading
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
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self.chosen: dict[int, int] = {}

    def record(self, size: int, num_draft_tokens: int, accepted: Sequence[int], seconds: float):
        """Count one step: its size of batch, K, accepted drafts of each row, and time."""
        times = self._seconds[size].setdefault(num_draft_tokens, deque(maxlen=_REMEMBERED))
        times.append(seconds)
        self._num_steps += 1
        self._last_step[size][num_draft_tokens] = self._num_steps
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

    def last_step(self, size: int, num_draft_tokens: int) -> int:
        """The number of the last such step, 0 if there was none."""
        return self._last_step[size].get(num_draft_tokens, 0)

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
            # Not 0, whatever the clock's resolution.
            return max(median(known[num_draft_tokens]), 1e-9)
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
        self._size = 0

    @property
    def limit(self) -> int:
        """No step drafts more than this."""
        return max(self.choices)

    def next(self, num_rows: int, most: int) -> int:
        """K for a step over ``num_rows`` active rows, at most ``most``."""
        # Batches of 4 to 7 rows cost much the same; of each size alone too little would be seen.
        self._size = num_rows.bit_length()
        self.current = max(self.choices)
        most = super().next(num_rows, most)
        allowed = [k for k in self.choices if k <= most]
        with self.measurements.lock:
            self.current = self._choose(allowed)
        self._began = self.clock()
        return self.current

    def update(self, num_draft_tokens: int, accepted: Sequence[int]) -> None:
        """Learn from a step: how many drafts each row accepted of those that `next` asked for.

        ``num_draft_tokens`` may be fewer, where a drafter was not sure enough to go on. What was
        asked for counts, as that is what is chosen.
        """
        elapsed = self.clock() - self._began
        with self.measurements.lock:
            self.measurements.record(self._size, self.current, accepted, elapsed)

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
