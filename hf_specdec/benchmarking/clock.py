"""Where a call's time goes: the target's forwards, the drafter, and the loop around them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_specdec.drafters import Drafter
from hf_specdec.modeling.placement import input_device

T = TypeVar("T")
_DRAFTER_METHODS = ("start", "share_cache", "observe", "propose", "propose_tree", "keep_rows")


def timed(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Wall-clock seconds of a call, a GPU's work included, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


def synchronize(device: torch.device) -> None:
    """Wait for the work that was handed to a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Sections:
    """Seconds of one call, or of several added up (``a + b``).

    Attributes:
        total: all of it.
        prompt: in the target's forward over the prompt.
        verification: in the target's further forwards.
        drafter: in the drafter's methods.
        steps: how many further forwards there were.
    """

    total: float = 0.0
    prompt: float = 0.0
    verification: float = 0.0
    drafter: float = 0.0
    steps: int = 0

    def __add__(self, other: Sections) -> Sections:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Sections(**sums)

    @property
    def target(self) -> float:
        """In the target's forwards."""
        return self.prompt + self.verification

    @property
    def loop(self) -> float:
        """In neither: preparation, verification, roll-back, stopping."""
        return self.total - self.target - self.drafter


def profile(target: PreTrainedModel, drafter: Drafter, call: Callable[[], Any]) -> Sections:
    """Run a call once and say where its time went.

    On a GPU every boundary waits for the device, so the parts add up but the whole takes longer
    than an undisturbed call.

    Args:
        target: the model; its forwards are hooked.
        drafter: the one that ``call`` drafts with; its methods are wrapped.
        call: generates.
    """
    sections = Sections()
    with _watched(target, drafter, sections):
        sections.total, _ = timed(call, input_device(target))
    return sections


@contextmanager
def _watched(target: PreTrainedModel, drafter: Drafter, sections: Sections) -> Iterator[None]:
    """Fill ``sections`` while the block runs; what is inside another part counts there alone."""
    started: list[float] = []
    inside: list[float] = []
    forwards: list[float] = []

    def enter(*_: Any) -> None:
        synchronize(input_device(target))
        started.append(time.perf_counter())
        inside.append(0.0)

    def leave() -> float:
        synchronize(input_device(target))
        elapsed = time.perf_counter() - started.pop()
        own = elapsed - inside.pop()
        if inside:
            inside[-1] += elapsed
        return own

    def after_forward(*_: Any) -> None:
        forwards.append(leave())

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            enter()
            try:
                return method(*args, **kwargs)
            finally:
                sections.drafter += leave()

        return watched

    hooks = [
        target.register_forward_pre_hook(enter),
        target.register_forward_hook(after_forward),
    ]
    try:
        with wrapped_methods(drafter, _DRAFTER_METHODS, wrapped):
            yield
        sections.prompt, sections.verification = sum(forwards[:1]), sum(forwards[1:])
        sections.steps = len(forwards[1:])
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def wrapped_methods(
    instance: Any, names: Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Methods of one object are called through ``wrap(method)`` while the block runs.

    Args:
        instance: the object; others of its class are left alone.
        names: of the methods; none leaves any object as it is.
        wrap: takes a bound method, returns what is called in its place.
    """
    if not names:
        yield
        return
    before = {name: instance.__dict__[name] for name in names if name in instance.__dict__}
    for name in names:
        # On the instance, in front of the class's own.
        instance.__dict__[name] = wrap(getattr(instance, name))
    try:
        yield
    finally:
        for name in names:
            del instance.__dict__[name]
        instance.__dict__.update(before)
