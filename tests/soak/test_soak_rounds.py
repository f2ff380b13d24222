"""What the rounds of calls say: a kind that keeps something is named with its bytes."""

import ctypes
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def rounds(script: Callable[[str], Any]) -> Any:
    """The script."""
    return script("soak_rounds")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc's mallinfo2")
def test_bytes_that_are_kept(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytearray] = []
    seen: list[float] = []

    def keeps(choice: random.Random, world: Any) -> None:
        seen.append(choice.random())
        kept.append(bytearray(100_000))

    def keeps_nothing(choice: random.Random, world: Any) -> None:
        bytearray(100_000)
        raise ValueError("is no business of the rounds")

    monkeypatch.setattr(rounds, "KINDS", {"keeps": (keeps, 1), "keeps nothing": (keeps_nothing, 1)})
    left = rounds.left_by_kind("keeps", None, calls=4, rounds=3)
    assert left == pytest.approx([100_000] * 2, rel=0.1)
    assert rounds.left_by_kind("keeps nothing", None, calls=4, rounds=2)[0] < 10_000
    # The same calls in every round, each another one.
    assert seen[:4] == seen[4:8] == seen[8:]
    assert len(set(seen)) == 4


def test_a_c_library_that_does_not_say(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"mallinfo2 of glibc 2\.33 or newer"):
        rounds.bytes_in_use()
