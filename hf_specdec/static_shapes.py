"""Functions of fixed shapes: compiled once for a model, kept, and run again by later calls.

Three things make a step cost what its kernels cost and no more:

* every tensor a function reads or writes in place lies in a `Workspace`, at an address that stays,
  in one of a few sizes (`bucket`), so that few functions serve all calls;
* the function is compiled by ``torch.compile`` with ``dynamic=False``, each on its own: functions
  that share code would share torch's limit of recompilations, and beyond it run uncompiled;
* on CUDA its kernels are recorded once for a workspace as a CUDA graph, and replayed.

The graphs are recorded here and not by torch's mode ``reduce-overhead``, whose outputs live in a
memory pool that the next compiled function may reuse (a target's states would be gone when the
drafter's function starts), and whose bookkeeping belongs to one thread. What a recording promises
is simple enough to be imitated in a test without a GPU: the same addresses in, the same out.

Boundary: nothing here knows what the functions compute.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.modeling.quantized import stored_parts

Tensors = tuple[torch.Tensor, ...]
# Runs before a recording: the first ones compile, and let libraries allocate what they keep.
_WARM_UPS = 2


@dataclass(frozen=True)
class CompileChoice:
    """How functions are compiled, as for ``torch.compile``.

    Attributes:
        backend: a name, or a function that takes a graph and example inputs.
        mode: ``None`` for the default one.
        options: for the backend, as sorted pairs.
        fullgraph: whether a function that isn't one graph is an error.
        graphs: whether kernels are recorded as CUDA graphs.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] | None = None
    fullgraph: bool = False
    graphs: bool = False


def bucket(count: int, least: int = 1) -> int:
    """The smallest power of two of at least ``count`` and ``least``.

    >>> [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)]
    [1, 2, 4, 4, 8, 8, 16]
    """
    return 1 << (max(count, least) - 1).bit_length()


@dataclass
class Workspace:
    """Tensors at fixed addresses, used by one call at a time, and what was recorded over them.

    Attributes:
        key: which calls it can serve.
        rows: the most rows of a batch.
        model_state: what the model was like when something was recorded, see `state_of`.
        tensors: by name.
    """

    key: Hashable
    rows: int
    model_state: Hashable = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _inputs: dict[Hashable, tuple[Any, ...]] = field(default_factory=dict)
    _recordings: dict[Hashable, Recording] = field(default_factory=dict)
    _pool: Any = None

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The tensor of this name, made (of zeros) if there is none or one of another kind."""
        old = self.tensors.get(name)
        if old is None or (old.shape, old.dtype, old.device) != (shape, dtype, device):
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self.tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
            self._inputs.clear()
            self._recordings.clear()
        return self.tensors[name]

    def run(
        self,
        key: Hashable,
        function: Callable[..., Tensors],
        views: Callable[[], tuple[Any, ...]],
        graphs: bool,
    ) -> Tensors:
        """Call a function with tensors of this workspace.

        Args:
            key: names the views of the tensors that the function gets.
            function: may write its inputs in place, if doing so twice is no different.
            views: makes its inputs: tensors, or lists and tuples of them, or ``None``. Asked once
                for a key, and again when a tensor was replaced.
            graphs: record on CUDA, and replay from then on.

        Returns:
            What the function returns, in memory that later runs don't touch.
        """
        # Compiled code is guarded by these modes; generate() may be called in any of them.
        with torch.inference_mode(False), torch.no_grad():
            inputs = self._inputs.get(key)
            if inputs is None:
                inputs = self._inputs[key] = without_base(views())
            if not graphs:
                return function(*inputs)
            recording = self._recordings.get((key, function))
            if recording is None:
                device = next(iter(self.tensors.values())).device
                recording = record(lambda: function(*inputs), self._shared_pool, device)
                self._recordings[key, function] = recording
            recording.replay()
            return tuple(output.clone() for output in recording.outputs)

    def expect(self, model_state: Hashable) -> None:
        """Drop what was recorded in another state of the model."""
        if self.model_state != model_state:
            self._recordings.clear()
            self.model_state = model_state

    def _shared_pool(self) -> Any:
        """One memory pool for all recordings, as no two of them run at a time."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


def without_base(values: Any) -> Any:
    """The same memory in tensors that are views of nothing, in lists and tuples as well.

    Of a graph that was traced with a view torch keeps the fake tensors for good (seen in 2.13): the
    view's base is known to C++ alone, and Python's collector can't see through. Its guards would
    look at the base as well, at every run.
    """
    if isinstance(values, torch.Tensor):
        own = torch.empty(0, dtype=values.dtype, device=values.device)
        storage = values.untyped_storage()
        return own.set_(storage, values.storage_offset(), values.shape, values.stride())
    if isinstance(values, (list, tuple)):
        return type(values)(without_base(value) for value in values)
    return values


@dataclass(frozen=True)
class Recording:
    """A function's kernels, to be launched all at once.

    Attributes:
        replay: computes the outputs from what is in the inputs by now.
        outputs: always the same memory.
    """

    replay: Callable[[], None]
    outputs: Tensors


def record(
    function: Callable[[], Tensors], pool: Callable[[], Any], device: torch.device
) -> Recording:
    """Record a function's CUDA kernels.

    Args:
        function: takes its inputs from fixed addresses; it is run a few times first.
        pool: gives the memory pool of the outputs and of everything in between.
        device: where it computes.

    Raises:
        RuntimeError: the function does what a graph can't hold, such as to read a result.
    """
    with torch.cuda.device(device):
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile is no part of it, and doesn't spoil it.
        capture = torch.cuda.graph(
            graph, pool=pool(), stream=stream, capture_error_mode="thread_local"
        )
        try:
            with capture:
                outputs = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "cache_implementation='static': a step of this model can't be recorded as a CUDA "
                f"graph ({str(error).splitlines()[0]}). Compile it without graphs, with "
                "compile_config=CompileConfig(mode='default'), or pass disable_compile=True"
            ) from error
    return Recording(graph.replay, outputs)


def state_of(model: torch.nn.Module) -> Hashable:
    """What a recording over a model depends on: it is replayed without a look at the model.

    Compiled code looks at the model at every run, a recording can't; so this is compared once a
    call. Modules, their switches (``training``, an adapter's scale or that it is off), hooks, and
    where the weights are.
    """
    modules = tuple(
        (
            id(module),
            type(module),
            repr([(k, v) for k, v in module.__dict__.items() if _is_switch(v)]),
            tuple(module._forward_hooks),
            tuple(module._forward_pre_hooks),
        )
        for module in model.modules()
    )
    tensors = (*model.parameters(), *model.buffers())
    weights = tuple(part.data_ptr() for t in tensors for part in stored_parts(t))
    config = getattr(model, "config", None)
    return modules, weights, None if config is None else repr(config)


def _is_switch(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_switch(entry) for entry in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_switch(entry) for key, entry in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


class StaticShapes:
    """What is kept for a model between calls: compiled functions, and workspaces not in use.

    Attributes:
        lock: to be held while a function of this model runs that leaves anything in the model.
        models: what functions are made of, by any name.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.models: dict[str, Any] = {}
        self._functions: dict[Hashable, Callable[..., Tensors]] = {}
        self._free: list[Workspace] = []

    def function(
        self, key: Hashable, choice: CompileChoice, make: Callable[[], Callable[..., Tensors]]
    ) -> Callable[..., Tensors]:
        """The compiled function of this key; made, and compiled when it is first called."""
        with self.lock:
            key = (key, choice.backend, choice.mode, repr(choice.options), choice.fullgraph)
            if key not in self._functions:
                self._functions[key] = _compile(make(), choice)
            return self._functions[key]

    def forget(self) -> None:
        """Drop everything; workspaces in use are dropped when they come back."""
        with self.lock:
            self.models.clear()
            self._functions.clear()
            self._free.clear()

    def borrow(self, key: Hashable, rows: int, model_state: Hashable = None) -> Workspace:
        """A workspace for ``rows`` rows that no other call has, with whatever was left in it.

        Of those that are too small for this call one is dropped: the larger one will serve both.

        Args:
            key: which calls it is for.
            rows: the most rows of this one.
            model_state: see `state_of`; what was recorded in another state is dropped.
        """
        with self.lock:
            mine = [i for i, w in enumerate(self._free) if w.key == key]
            # A fitting one if there is any.
            mine.sort(key=lambda i: self._free[i].rows < rows)
            work = self._free.pop(mine[0]) if mine else None
        if work is None or work.rows < rows:
            return Workspace(key, rows, model_state)
        work.expect(model_state)
        return work

    def give_back(self, workspace: Workspace) -> None:
        """Keep a workspace for the next call."""
        with self.lock:
            self._free.append(workspace)


_kept: weakref.WeakKeyDictionary[Any, StaticShapes] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def kept_for(model: torch.nn.Module) -> StaticShapes:
    """What is kept for a model; it goes when the model goes."""
    with _lock:
        return _kept.setdefault(model, StaticShapes())


def release_compiled(model: torch.nn.Module) -> None:
    """Drop compiled functions, CUDA graphs and buffers kept for a model; the next call makes new.

    Args:
        model: a target or a drafter that static shapes were used with; any other is left alone.
    """
    with _lock:
        shapes = _kept.pop(model, None)
    if shapes is not None:
        shapes.forget()


def _compile(function: Callable[..., Tensors], choice: CompileChoice) -> Callable[..., Tensors]:
    # Dynamo keeps what it compiled with the code object: a copy of it is an entry of its own.
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    # It would keep it beyond the function as well, and the modules that it was traced over.
    weakref.finalize(own, _drop_compiled, own.__code__).atexit = False
    return torch.compile(
        own,
        dynamic=False,
        backend=choice.backend,
        mode=choice.mode,
        options=None if choice.options is None else dict(choice.options),
        fullgraph=choice.fullgraph,
    )


def _drop_compiled(code: types.CodeType) -> None:
    """Free what torch has compiled for a code object, as ``torch.compiler.reset`` does for all.

    What checks the guards stays in finalizers of the classes it looked at, which are for ever, with
    the place in the source of every guard: a megabyte for three layers. It is emptied.
    """
    frames = torch._dynamo.eval_frame
    entries = getattr(frames, "_debug_get_cache_entry_list", None)
    guards = [] if entries is None else [entry.guard_manager for entry in entries(code)]
    if (reset := getattr(frames, "reset_code", None)) is not None:
        reset(code)
        for manager in guards:
            vars(manager).clear()
            manager.cache_entry = None  # the finalizers ask for it
