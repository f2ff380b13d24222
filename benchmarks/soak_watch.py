"""What must not change while calls come and go: models, configs, threads, files, memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.generation import GenerationMixin
from transformers.pipelines import base as pipelines

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
MIB = 2**20
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
_SEAMS = (
    "generate",
    "_extract_generation_mode_kwargs",
    "_validate_generation_mode",
    "_get_candidate_generator",
    "_assisted_decoding",
)
# Counts of objects from which growth can be told.
_FEWEST = 6
# Of hf_specdec's types those that live longer than a call on purpose: what a drafter has shown,
# shapes of trees, buffers of static shapes, what is attached.
KEPT = frozenset(
    {
        "AcceptanceRates",
        "Attachment",
        "Measurements",
        "SpeculationTotals",
        "SpeculativeConfig",
        "StaticShapes",
        "TokenTree",
        "TreeShape",
        "Trials",
        "Workspace",
    }
)


def resident() -> float | None:
    """MiB that the process holds; ``None`` where /proc doesn't say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / MIB
    return None


def open_files() -> int:
    """File descriptors of the process, 0 where /proc doesn't say."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0


def num_hooks(models: Sequence[torch.nn.Module]) -> int:
    """Hooks of every kind on all modules."""
    modules = {id(m): m for model in models for m in model.modules()}.values()
    return sum(len(getattr(m, name, ())) for m in modules for name in _HOOKS)


def state_of_models(models: Sequence[Any]) -> dict[str, Any]:
    """Everything a call could leave behind in models and in the libraries, by name."""
    state: dict[str, Any] = {}
    for i, model in enumerate(models):
        modules = list(model.modules())
        configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}.values()
        generation = getattr(model, "generation_config", None)
        state |= {
            f"model {i}: hooks": num_hooks([model]),
            f"model {i}: attributes": [sorted(m.__dict__) for m in modules],
            f"model {i}: training": [m.training for m in modules],
            f"model {i}: attention": [c._attn_implementation for c in configs],
            f"model {i}: config": repr(model.config.to_dict()),
            f"model {i}: generation_config": generation and repr(generation.to_dict()),
            f"model {i}: gradients": any(p.grad is not None for p in model.parameters()),
        }
    # New wrappers each time that the seams are opened, but always one around the original.
    functions = [getattr(GenerationMixin, name) for name in _SEAMS]
    functions.append(pipelines.load_assistant_model)
    state["seams"] = [(f.__code__.co_filename, _depth(f)) for f in functions]
    state["attention functions"] = sorted(AttentionInterface().keys())
    state["modes"] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
    state["warnings"] = len(warnings.filters)
    return state


def _depth(function: Any) -> int:
    """Wrappers around a function."""
    inner = getattr(function, "__wrapped__", None)
    return 0 if inner is None else 1 + _depth(inner)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What changed, in words."""
    return [
        f"{name} changed: {str(before.get(name))[:200]} -> {str(value)[:200]}"
        for name, value in after.items()
        if before.get(name) != value
    ]


def live_types() -> Counter[str]:
    """How many objects of each type the garbage collector knows, tensors included."""
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def live_tensors() -> tuple[int, int]:
    """Tensors, and the bytes of their storages."""
    # Not the ones of torch's compiler, which have no memory.
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors
            if t.layout == torch.strided and t.device.type == "cpu"
        }
    return len(tensors), sum(storages.values())


@contextlib.contextmanager
def freed_at_once(problems: list[str]) -> Iterator[None]:
    """Objects of hf_specdec made inside the block must go with it, not with the next collection.

    A cycle would keep a call's keys and values until the collector comes by.

    Args:
        problems: what is still there is appended.
    """
    gc.collect()
    before = live_types()
    gc.disable()
    try:
        yield
        after = live_types()
    finally:
        gc.enable()
    for name, count in (after - before).items():
        if name.startswith("hf_specdec.") and name.rsplit(".", 1)[1] not in KEPT:
            problems.append(f"{count} of {name} outlive the call")


class Watch:
    """Compares the process with what it was like when it began.

    Args:
        models: all that calls may touch.
    """

    def __init__(self, models: Sequence[Any]):
        self._models = list(models)
        self._before = state_of_models(self._models)
        self._hooks = num_hooks(self._models)
        self._threads = threading.active_count()
        self._files = open_files()

    def look(self) -> list[str]:
        """What the last call has left behind."""
        return differences(self._before, state_of_models(self._models))

    @property
    def leaked_hooks(self) -> int:
        """Hooks that weren't there."""
        return num_hooks(self._models) - self._hooks

    def settle(self) -> None:
        """From now on threads and files must not become more."""
        gc.collect()
        self._threads, self._files = threading.active_count(), open_files()

    def left_open(self) -> list[str]:
        """Threads and files that are more than they were."""
        problems = []
        if threading.active_count() > self._threads:
            names = [thread.name for thread in threading.enumerate()]
            problems.append(f"threads: {self._threads} -> {len(names)}: {names}")
        if open_files() > self._files:
            problems.append(f"file descriptors: {self._files} -> {open_files()}")
        return problems


# Tables that fill as long as there are cases they haven't seen, and how many that can be: the times
# that "auto" remembers, for each drafter, number of rows and choice.
_FILLED = {"collections.deque": 500}


class TypeCounts:
    """How many objects of each type there were at a few times, evenly spread over the run."""

    # More would themselves be what grows.
    _MOST = 10

    def __init__(self) -> None:
        self._counts: list[Counter[str]] = []
        self._every = 1
        self._asked = 0

    def count(self) -> None:
        """Count now, or not: the longer the run, the rarer."""
        self._asked += 1
        if self._asked % self._every:
            return
        gc.collect()
        self._counts.append(live_types())
        if len(self._counts) > self._MOST:
            self._counts = self._counts[1::2]
            self._every *= 2

    def growing(self, least: int = 20) -> dict[str, int]:
        """Types that became more from each count of the second half to the next.

        Args:
            least: new objects in that half that count as growth.

        Returns:
            By type how many more; nothing as long as too little was counted to tell growth from
            what comes once and stays.
        """
        if len(self._counts) < _FEWEST:
            return {}
        half = self._counts[len(self._counts) // 2 - 1 :]
        return {
            name: count - half[0][name]
            for name, count in half[-1].most_common()
            if count - half[0][name] >= least
            and count > _FILLED.get(name, 0)
            and all(a[name] < b[name] for a, b in zip(half, half[1:], strict=False))
        }
