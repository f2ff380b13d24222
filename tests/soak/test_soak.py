"""Mixed calls with exceptions thrown in leave nothing behind, and say what plain generation says.

Short here; an hour of it with ``pytest -m exhaustive``, or ``benchmarks/soak.py``, with figures.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

# Left to the long runs: torch's compiler alone takes longer to import than all of this.
WITHOUT = {"static shapes": 0.0}
SEED = 9


@pytest.fixture(scope="module")
def soak_run(script: Callable[[str], Any]) -> Any:
    """The module of the soak."""
    return script("soak_run")


def judge(report: Any) -> None:
    assert report.failures == []
    assert report.most_leaked_hooks == 0
    assert report.outcome.unequal == 0
    assert report.grown == {}


def test_a_dozen_calls_and_a_half(soak_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Looked at with the garbage collector off, so that what a call leaves in a circle is seen.
    monkeypatch.setattr(soak_run, "STRIDE", 4)
    report = soak_run.Soak(SEED, ["llama", "mimo"], WITHOUT).run(lambda report: report.calls == 18)
    judge(report)
    # It did what it says.
    assert report.calls == 18
    assert report.outcome.injected >= 2
    assert report.outcome.accepted >= 10
    assert {"a call", "a failing call", "rejection"} <= set(report.kinds)


def test_a_call_follows_from_its_seed_and_number(soak_run: Any) -> None:
    counts = []
    for _ in range(2):
        soak = soak_run.Soak(SEED, ["llama"], WITHOUT)
        for number in (7, 8):
            soak.call(number)
        outcome = soak.report.outcome
        counts.append((soak.report.kinds, outcome.tokens, outcome.injected))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


def test_faults_that_do_not_strike_change_nothing(
    soak_run: Any, script: Callable[[str], Any]
) -> None:
    """One in a criterion stands beside the call's own criteria, which end rows."""
    soak_calls, soak_faults = script("soak_calls"), script("soak_faults")
    pair, made, struck = soak_run.make_pair("llama"), 0, 0
    for number in range(80):
        choice = random.Random(number)
        fault, call = soak_faults.Fault(choice), soak_calls.random_call(choice, pair)
        if "limits" not in call.arguments:
            continue
        if number % 8:
            fault._left = 10**6
        outcome = call.run(fault)
        assert (outcome.unequal, outcome.problems) == (0, []), f"{number}: {fault}"
        made, struck = made + 1, struck + outcome.injected
    assert made >= 8
    assert struck >= 1


@pytest.mark.exhaustive
def test_an_hour(soak_run: Any) -> None:
    report = soak_run.Soak(SEED).run(lambda report: report.seconds > 3600)
    judge(report)
    assert report.growth() is None or report.growth() < 16
