"""The time of single steps of any generation loop: this library's, transformers' plain or assisted.

A step reaches from the end of one forward of the target to the end of the next. So what is done
once a call (preparation, the prompt, the first allocation of a cache) is in none of them, and loops
that share no code can be compared.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.benchmarking.clock import synchronize, wrapped_methods
from hf_specdec.drafters import Drafter
from hf_specdec.modeling.placement import input_device

# `get_candidates` is what transformers' own loop calls; it calls the others.
_DRAFTING = ("share_cache", "observe", "propose", "keep_rows", "get_candidates")


@dataclass(frozen=True)
class Step:
    """Seconds of one step.

    Attributes:
        total: from the end of one forward to the end of the next.
        target: in that next forward.
        drafter: in the drafter's methods.
    """

    total: float
    target: float
    drafter: float

    @property
    def loop(self) -> float:
        """In neither of the two."""
        return self.total - self.target - self.drafter


def step_times(
    target: PreTrainedModel, call: Callable[[], Any], drafter: Drafter | None = None
) -> list[Step]:
    """Run a call that generates, and time its steps.

    Args:
        target: the model; its forwards are hooked. The first one of the call is the prompt's.
        call: generates with ``target``.
        drafter: the one that ``call`` drafts with, as an object; its methods are wrapped.

    Returns:
        The steps behind the prompt's forward, in order. On a GPU every boundary waits for the
        device, so that the parts are right and the whole is slower than undisturbed.
    """
    forwards: list[tuple[float, float]] = []
    drafting: list[tuple[float, float]] = []

    def begin() -> None:
        forwards.append((_now(target), 0.0))

    def end() -> None:
        forwards[-1] = (forwards[-1][0], _now(target))

    with _watched(target, drafter, begin, end, lambda *span: drafting.append(span)):
        call()
    steps = []
    for (_, before), (start, stop) in zip(forwards, forwards[1:], strict=False):
        inside = sum(b - a for a, b in drafting if before <= a < stop)
        steps.append(Step(stop - before, stop - start, inside))
    return steps


@contextmanager
def _watched(
    target: PreTrainedModel,
    drafter: Drafter | None,
    begin: Callable[[], None],
    end: Callable[[], None],
    drafted: Callable[[float, float], None],
) -> Iterator[None]:
    """Call back at the boundaries of the two networks while the block runs.

    Args:
        target: the model.
        drafter: the one whose methods are watched.
        begin, end: called before and after each forward of the target.
        drafted: called with begin and end of each call of the drafter, outermost calls alone.
    """
    depth = 0

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            start = _now(target) if depth == 1 else 0.0
            try:
                return method(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    drafted(start, _now(target))

        return watched

    hooks = [
        target.register_forward_pre_hook(lambda *_: begin()),
        target.register_forward_hook(lambda *_: end()),
    ]
    try:
        with wrapped_methods(drafter, _DRAFTING if drafter is not None else (), wrapped):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _now(target: PreTrainedModel) -> float:
    synchronize(input_device(target))
    return time.perf_counter()
