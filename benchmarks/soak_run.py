"""Call after call, each by a number from which all of it follows, and a look at the process."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from soak_calls import Outcome
from soak_kinds import KINDS, World
from soak_models import TARGETS, make_pair, make_tokenizer
from soak_watch import MIB, TypeCounts, Watch, freed_at_once, live_tensors, resident

# Every so many calls one is watched with the collector off, and memory is read.
STRIDE = 50
# Seconds of a run whose memory says something.
_SHORTEST = 600
# Kinds that make cycles or keep things on purpose: transformers' pipelines, torch's compiler.
_NOT_FREED_AT_ONCE = ("a pipeline", "models of its own", "static shapes", "threads")


@dataclass
class Report:
    """What a soak has seen.

    Attributes:
        seed: of all its calls.
        calls, seconds: made so far, and how long that took.
        kinds: calls of each kind.
        outcome: sums over all calls.
        failures: what was wrong, with the number of the call.
        most_leaked_hooks: at any time.
        memory: seconds and resident MiB, of every `STRIDE` calls.
        tensors: count and MiB of living tensors at the same times.
        grown: types of objects that became more all the time, and by how many.
    """

    seed: int
    calls: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    outcome: Outcome = field(default_factory=Outcome)
    failures: list[str] = field(default_factory=list)
    most_leaked_hooks: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    tensors: list[tuple[int, float]] = field(default_factory=list)
    grown: dict[str, int] = field(default_factory=dict)

    def growth(self) -> float | None:
        """MiB an hour: the slope of a line through the resident memory of the second half.

        ``None`` for runs too short to tell growth from what is loaded once.
        """
        half = [(t, m) for t, m in self.memory if t >= self.seconds / 2]
        if len(half) < 3 or self.seconds < _SHORTEST:
            return None
        mean_t = sum(t for t, _ in half) / len(half)
        mean_m = sum(m for _, m in half) / len(half)
        spread = sum((t - mean_t) ** 2 for t, _ in half)
        return 3600 * sum((t - mean_t) * (m - mean_m) for t, m in half) / spread

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        values = {**vars(self), "kinds": dict(self.kinds), "outcome": asdict(self.outcome)}
        for name in ("memory", "tensors"):
            values[name] = [(round(a, 1), round(b, 2)) for a, b in values[name]]
        return {**values, "growth_mib_per_hour": self.growth()}


class Soak:
    """A soak in this process.

    Args:
        seed: every call follows from this and its number.
        targets: names of the tiny targets; all by default.
        scale: weights of the kinds are multiplied by what it says for their names.
    """

    def __init__(
        self, seed: int, targets: list[str] | None = None, scale: dict[str, float] | None = None
    ):
        names = targets or [*TARGETS, "gemma4"]
        self.world = World([make_pair(name) for name in names], make_tokenizer())
        self.watch = Watch(self.world.models())
        self.report = Report(seed)
        self._names = list(KINDS)
        self._weights = [KINDS[n][1] * (scale or {}).get(n, 1) for n in self._names]
        self._start = time.monotonic()
        self._types = TypeCounts()

    def call(self, number: int) -> None:
        """Make call ``number``, and look what it has left behind."""
        report = self.report
        choice = random.Random(f"{report.seed}:{number}")
        name = choice.choices(self._names, self._weights)[0]
        torch.manual_seed(choice.randrange(2**31))
        leftovers: list[str] = []
        watches = number % STRIDE == 0 and name not in _NOT_FREED_AT_ONCE
        try:
            with freed_at_once(leftovers) if watches else contextlib.nullcontext():
                outcome = KINDS[name][0](choice, self.world)
        except Exception as error:
            outcome = Outcome(problems=[f"{type(error).__name__}: {error}"])
        found = [*outcome.problems, *leftovers, *self.watch.look()]
        if outcome.unequal:
            found.append(f"{outcome.unequal} texts differ from plain generation")
        report.failures += [f"call {number} ({name}): {problem}" for problem in found]
        report.most_leaked_hooks = max(report.most_leaked_hooks, self.watch.leaked_hooks)
        outcome.problems = []
        report.outcome.add(outcome)
        report.kinds[name] += 1
        report.calls += 1
        report.seconds = time.monotonic() - self._start
        if number % STRIDE == 0:
            self._measure()

    def run(self, is_over: Callable[[Report], bool], first: int = 0) -> Report:
        """Make calls until ``is_over``.

        Args:
            is_over: asked after every call.
            first: number of the first call.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._warm_up()
            for number in itertools.count(first):
                self.call(number)
                if is_over(self.report):
                    break
        self.report.failures += self.watch.left_open()
        self.report.grown = self._types.growing()
        return self.report

    def _warm_up(self) -> None:
        """One of every kind: what is loaded and kept once for all calls is there from then on."""
        for name in self._names:
            if self._weights[self._names.index(name)]:
                KINDS[name][0](random.Random(f"{self.report.seed}:{name}"), self.world)
        self.watch = Watch(self.world.models())
        self.watch.settle()
        self._start = time.monotonic()

    def _measure(self) -> None:
        count, size = live_tensors()
        self.report.tensors.append((count, size / MIB))
        self._types.count()
        if (memory := resident()) is not None:
            self.report.memory.append((self.report.seconds, memory))
