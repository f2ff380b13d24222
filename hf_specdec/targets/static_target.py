"""A target whose verifying forward has static shapes: compiled, and on CUDA replayed as a graph.

K is fixed for a call: a step that drafts less runs as wide, and its last columns are ignored. The
batch has one of the sizes of `bucket`; when rows have finished and the rest fits a smaller size, it
shrinks (see `static_cache` for the rows in between). The prompt is run as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.caches.static_cache import RowNumbers, StepCache, WorkspaceCache, visible_keys
from hf_specdec.static_shapes import (
    CompileChoice,
    StaticShapes,
    Tensors,
    bucket,
    kept_for,
    state_of,
)
from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.recorded_states import RecordedModel
from hf_specdec.targets.switches import switched
from hf_specdec.targets.target import RaggedTarget, TargetOutput
from hf_specdec.tree import TokenTree

# Slots of the smallest buffers.
_LEAST_SLOTS = 128


class StaticTarget(RaggedTarget):
    """A `RaggedTarget` with static shapes; arguments as there, and:

    Args:
        choice: how the forward is compiled.
        widths: the query lengths it is compiled for, in order; the last is ``max_query_length``.
    """

    cache: WorkspaceCache

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        max_query_length: int,
        max_length: int,
        collect: dict[str, bool] | None = None,
        given: Cache | None = None,
        retain: bool = False,
        *,
        choice: CompileChoice,
        widths: Sequence[int],
    ):
        self._choice, self._widths = choice, widths
        self._retains = retain
        self._shapes = kept_for(model)
        self._num_slots = bucket(max_length + max_query_length, _LEAST_SLOTS)
        key = (self._num_slots, max_query_length)
        state = state_of(model) if choice.graphs else None
        self._workspace = self._shapes.borrow(key, bucket(prompt.num_rows), state)
        super().__init__(
            model,
            prompt,
            max_query_length,
            max_length,
            collect,
            given,
            retain,
            cache_class=functools.partial(WorkspaceCache, self._workspace, self._num_slots),
        )
        self._feed = "post_norm"
        self._reads_prompt = False
        self._is_over = False
        self._last_width = 0

    @contextmanager
    def capture(self, feed: str = "post_norm", whole_prompt: bool = False) -> Iterator[None]:
        """See `TargetRunner.capture`; hooks are there for the prompt alone."""
        self._feed, self._reads_prompt = feed, whole_prompt
        with switched(self.model):
            yield
        # Not after an error, which may have come in the middle of a recording.
        self._shapes.give_back(self._workspace)

    def prefill(self, model_kwargs: dict[str, Any], chunk_size: int | None = None) -> TargetOutput:
        """See `TargetRunner.prefill`."""
        with super().capture(self._feed, self._reads_prompt):
            output = super().prefill(model_kwargs, chunk_size)
        self._write_numbers()
        return output

    def verify(self, tokens: torch.Tensor, tree: TokenTree | None = None) -> TargetOutput:
        """See `TargetRunner.verify`; calls that draft trees don't get this runner."""
        assert tree is None
        if self._is_over:
            # Rows are back that left the batch long ago; once, that isn't worth a function.
            return super().verify(tokens)
        rows, width = tokens.shape
        wide = self._width(width)
        size = bucket(rows)
        work, device = self._workspace, tokens.device
        ids = work.tensor(f"tokens{wide}", (work.rows, wide), torch.long, device)
        ids[:rows, :width] = tokens
        self._numbers()[:rows, RowNumbers.LENGTH] = self.cache.lengths
        logits, states = self._run(ids[:size], self._layout())
        return TargetOutput(logits[:rows, :width], states[:rows, :width])

    def _width(self, width: int) -> int:
        """The width to run ``width`` tokens in: the next one, as a rule."""
        room = self._max_length - 1 - min(self.cache.host_lengths)
        # Near the limit of the length drafts are cut: nothing is compiled for the last step.
        if width < room or width > self._last_width:
            self._last_width = next(w for w in self._widths if w >= width)
        return self._last_width

    def keep_rows(self, order: Sequence[int]) -> None:
        """See `TargetRunner.keep_rows`; what the numbers say of a row moves with it."""
        before = list(range(self.cache.num_rows))
        after = before.copy()
        for target, source in enumerate(order):
            if target != source:
                after[target] = before[source]
                if self._retains:
                    after[source] = before[target]
        numbers = self._numbers()
        numbers[: len(before), RowNumbers.LENGTH] = self.cache.lengths
        if after != before:
            index = torch.tensor(after, device=numbers.device)
            numbers[: len(after)] = numbers[index]
            if self._prompt.hidden is not None:
                hidden = self._hidden()
                hidden[: len(after)] = hidden[index]
            if (shifts := self._axes()) is not None:
                shifts[:, : len(after)] = shifts[:, index]
        super().keep_rows(order)

    def hand_out(self, cache: Cache, last_tokens: torch.Tensor, lengths: Sequence[int]) -> Cache:
        """See `TargetRunner.hand_out`; copies, as the buffers serve the next call."""
        self._is_over = True
        with super().capture(self._feed, self._reads_prompt):
            return super().hand_out(cache, last_tokens, lengths)

    def _numbers(self) -> torch.Tensor:
        """int64 ``[rows, 4]``, see `RowNumbers`."""
        shape = (self._workspace.rows, RowNumbers.COUNT)
        device = self._prompt.padding.device
        return self._workspace.tensor("numbers", shape, torch.long, device)

    def _hidden(self) -> torch.Tensor:
        """bool ``[rows, slots]``: slots of the prompt that nobody may see."""
        shape = (self._workspace.rows, self._num_slots)
        device = self._prompt.padding.device
        return self._workspace.tensor("hidden", shape, torch.bool, device)

    def _axes(self) -> torch.Tensor | None:
        """int64 ``[C, rows]``, see `Prompt`; ``None`` for a model with one axis."""
        if self._shifts is None:
            return None
        axes, device = len(self._shifts), self._prompt.padding.device
        return self._workspace.tensor(
            f"shifts{axes}", (axes, self._workspace.rows), torch.long, device
        )

    def _write_numbers(self) -> None:
        """Say of every row where it stands behind the prompt; fillers are empty rows."""
        rows, numbers = self._prompt.num_rows, self._numbers().zero_()
        numbers[:rows, RowNumbers.LENGTH] = self.cache.lengths
        numbers[:rows, RowNumbers.PADDING] = self.cache.padding
        numbers[:rows, RowNumbers.OFFSET] = self.cache.offsets
        numbers[:rows, RowNumbers.LAST_POSITION] = self._last_positions
        if (hidden := self._prompt.hidden) is not None:
            self._hidden().zero_()[:rows, : hidden.shape[1]] = hidden
        if (shifts := self._prompt.shifts) is not None and (axes := self._axes()) is not None:
            axes.zero_()[:, :rows] = shifts

    def _layout(self) -> _Layout:
        layers = self.cache.ragged_layers
        return _Layout(
            num_slots=self._num_slots,
            # In the dtype of the scores: eager attention adds it to them.
            dtype=self.cache.dtype or self.model.dtype,
            windows=tuple(self.cache.windows.items()),
            rings=tuple(
                layer.keys.shape[2] if layer.is_initialized and layer.is_sliding else None
                for layer in layers
            ),
            ring_extra=self.cache.max_query_length,
        )

    def _run(self, tokens: torch.Tensor, layout: _Layout) -> Tensors:
        """Logits ``[b, Q, V]`` and states ``[b, Q, d]`` of all rows of a bucket, fillers too."""
        size, width = tokens.shape
        has_hidden, shifts = self._prompt.hidden is not None, self._axes()
        key = (size, width, has_hidden, None if shifts is None else len(shifts))

        def views() -> tuple[Any, ...]:
            buffers = [
                (layer.keys[:size], layer.values[:size]) if layer.is_initialized else None
                for layer in self.cache.ragged_layers
            ]
            hidden = self._hidden()[:size] if has_hidden else None
            axes = None if shifts is None else shifts[:, :size]
            return tokens, self._numbers()[:size], buffers, hidden, axes

        with self._shapes.lock:
            recorded = _recorded_model(self._shapes, self.model, self._feed)
            keep_logits = self._keep_logits(0)
            function = self._shapes.function(
                ("verify", self._feed, layout, *key),
                self._choice,
                lambda: _verify_function(recorded, layout, keep_logits),
            )
            return self._workspace.run(
                ("verify", self._feed, *key), function, views, self._choice.graphs
            )


def ragged_target(
    choice: CompileChoice | None, widths: Sequence[int], **arguments: Any
) -> RaggedTarget:
    """The runner of a call; ``choice``: how it is compiled, ``None`` if it isn't."""
    if choice is None:
        return RaggedTarget(**arguments)
    return StaticTarget(**arguments, choice=choice, widths=widths)


@dataclass(frozen=True)
class _Layout:
    """What the buffers of a call look like.

    Attributes:
        num_slots: of layers that keep all.
        dtype: of the keys.
        windows: the window (or ``None``) of each layer type.
        rings: for each layer the slots of its ring, or ``None``.
        ring_extra: slots of a ring beyond its window.
    """

    num_slots: int
    dtype: torch.dtype
    windows: tuple[tuple[str, int | None], ...]
    rings: tuple[int | None, ...]
    ring_extra: int

    def ring(self, window: int | None) -> int | None:
        """Slots of a ring for this window; ``None`` without one."""
        if window is None:
            return None
        return min(self.num_slots, window + self.ring_extra)


def _recorded_model(shapes: StaticShapes, model: Any, feed: str) -> RecordedModel:
    """The target with its states kept aside; what was compiled for another head goes."""
    recorded = shapes.models.get(feed)
    if recorded is None or not recorded.follow():
        shapes.forget()
        recorded = shapes.models[feed] = RecordedModel(model, feed)
    return recorded


def _verify_function(
    recorded: RecordedModel, layout: _Layout, keep_logits: dict[str, int]
) -> Callable[..., Tensors]:
    """The function that is compiled; see `StaticTarget._run` for what it takes and returns."""
    model, recorder, num_slots = recorded.model, recorded.recorder, layout.num_slots
    kinds = [(name, window, layout.ring(window)) for name, window in layout.windows]
    rings, dtype = layout.rings, layout.dtype
    lowest = torch.finfo(dtype).min

    def verify(
        tokens: torch.Tensor,
        numbers: torch.Tensor,
        buffers: list[tuple[torch.Tensor, torch.Tensor] | None],
        hidden: torch.Tensor | None,
        shifts: torch.Tensor | None,
    ) -> Tensors:
        lengths, padding, offsets, last = numbers.unbind(1)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        slots = lengths[:, None] + steps
        # Behind the limit nothing is emitted, but a table of positions must have one.
        positions = torch.minimum(slots - offsets[:, None], last[:, None]).clamp(min=0)
        if shifts is not None:
            positions = positions + shifts[..., None]
        masks: Any = {}
        for name, window, ring in kinds:
            visible = visible_keys(slots, padding, num_slots, window, ring, hidden)
            blocked = torch.zeros((), dtype=dtype, device=tokens.device)
            masks[name] = torch.where(visible, blocked, lowest)
        if len(kinds) == 1:
            masks = masks[kinds[0][0]]
        output = model(
            input_ids=tokens,
            attention_mask=masks,
            position_ids=positions,
            cache=StepCache(buffers, rings, slots),
            use_cache=True,
            return_dict=True,
            **keep_logits,
        )
        states = recorder.states
        recorder.states = None
        return output.logits, states

    return verify
