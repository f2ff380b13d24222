"""Exceptions thrown into calls of ``generate`` wherever a caller's code runs, and bad input."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from hf_specdec import Drafter, RowStreamer
from hf_specdec.drafters import NGramDrafter


class InjectedError(RuntimeError):
    """Thrown in on purpose."""


class InjectedMemoryError(MemoryError):
    """As if memory had run out."""


class InjectedInterrupt(KeyboardInterrupt):
    """As if somebody had pressed Ctrl-C."""


INJECTED = (InjectedError, InjectedMemoryError, InjectedInterrupt)
DRAFTER_METHODS = ("start", "share_cache", "observe", "propose", "keep_rows")
PLACES = ("target", "assistant", "drafter", "processor", "criterion", "streamer")


class Fault:
    """Raises once, in the n-th call of `strike`.

    Args:
        choice: says where, when and what.
    """

    def __init__(self, choice: random.Random):
        self.place = choice.choice(PLACES)
        self.error = choice.choice(INJECTED)
        self._method = choice.choice(DRAFTER_METHODS)
        self._which = choice.random()
        # Often at once or soon; few calls have as many steps as the last ones.
        self._left = choice.choice((0, 0, 1, 2, 3, 5, 8, 13, 21))
        self.raised: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.error.__name__} in the {self.place}"

    def strike(self, *_: Any, **__: Any) -> None:
        """Count, and raise when it is time."""
        self._left -= 1
        if self._left < 0 and self.raised is None:
            self.raised = self.error("injected")
            raise self.raised

    @contextlib.contextmanager
    def installed(self, target: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Arguments for ``generate`` with the fault in them; models are left as they were.

        Args:
            target: the model.
            arguments: those of the call; not modified.
        """
        assistant = arguments.get("assistant_model")
        changed = dict(arguments)
        with contextlib.ExitStack() as undo:
            if self.place == "processor":
                changed["logits_processor"] = LogitsProcessorList([_Processor(self.strike)])
            elif self.place == "criterion":
                # Beside the call's own, which may end rows.
                own = arguments.get("stopping_criteria", [])
                changed["stopping_criteria"] = [*own, _Criterion(self.strike)]
            elif self.place == "streamer":
                rows = len(arguments["input_ids"])
                made = _Streamer if rows == 1 else _RowStreamer
                changed["streamer"] = made(self.strike)
            elif self.place != "target" and isinstance(assistant, Drafter):
                undo.enter_context(_patched(assistant, self._method, self.strike))
            elif self.place != "target" and isinstance(assistant, torch.nn.Module):
                undo.callback(self._hook(assistant).remove)
            else:
                undo.callback(self._hook(target).remove)
            yield changed

    def _hook(self, model: torch.nn.Module) -> Any:
        modules = list(model.modules())
        return modules[int(self._which * len(modules))].register_forward_pre_hook(self.strike)


@contextlib.contextmanager
def _patched(drafter: Drafter, name: str, strike: Callable[..., None]) -> Iterator[None]:
    method = getattr(drafter, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        strike()
        return method(*args, **kwargs)

    setattr(drafter, name, wrapper)
    try:
        yield
    finally:
        delattr(drafter, name)


class _Processor(LogitsProcessor):
    def __init__(self, strike: Callable[..., None]):
        self._strike = strike

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._strike()
        return scores

    def __deepcopy__(self, memo: Any) -> _Processor:
        return self


class _Criterion(StoppingCriteria):
    def __init__(self, strike: Callable[..., None]):
        self._strike = strike

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._strike()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _Streamer(BaseStreamer):
    def __init__(self, strike: Callable[..., None]):
        self.put = self.end = strike  # type: ignore[method-assign]

    def put(self, value: Any) -> None:
        """Replaced."""

    def end(self) -> None:
        """Replaced."""


class _RowStreamer(RowStreamer):
    def __init__(self, strike: Callable[..., None]):
        super().__init__()
        self.put_rows = self.end = strike  # type: ignore[method-assign]

    def put_rows(self, steps: Any) -> None:
        """Replaced."""


# What no call can be served with, and is to be refused before the target runs.
BAD_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"num_assistant_tokens": -1},
    {"num_assistant_tokens": 10**9},
    {"num_assistant_tokens": "many"},
    {"num_assistant_tokens": 1.5},
    {"row_seeds": [1] * 99, "do_sample": True},
    {"row_seeds": "abc", "do_sample": True},
    {"verification": "maybe"},
    {"num_tree_nodes": -3},
    {"speculative_token_tree": "[(0"},
    {"speculative_token_tree": [(0,)], "num_tree_nodes": 4},
    {"num_speculative_tokens_per_batch_size": [[3, 1, 1]]},
    {"prompt_lookup_num_tokens": -2},
    {"num_beams": 3},
    {"max_new_tokens": -4},
    {"speculative_config": {"method": "unheard_of"}},
    {"attention_mask": torch.zeros(1, 1, dtype=torch.long)},
    {"no_such_argument": 1},
)


def refuse(choice: random.Random, target: Any, arguments: dict[str, Any]) -> str | None:
    """Call with a bad argument; what is wrong if it isn't refused before the target runs."""
    bad = choice.choice(BAD_ARGUMENTS)
    if isinstance(arguments["assistant_model"], NGramDrafter) and "num_beams" in bad:
        bad = BAD_ARGUMENTS[0]
    ran = []
    handle = target.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        target.generate(**{**arguments, **bad})
    except (ValueError, TypeError):
        return f"{bad} was refused after {len(ran)} forwards" if ran else None
    finally:
        handle.remove()
    return f"{bad} was not refused"
