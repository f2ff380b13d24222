"""The cache of a call with static shapes: a `RaggedCache` whose buffers never move.

Its layers live in a `Workspace`, with as many rows as a bucket has and slots for the longest row
that the call can reach. The prompt is written and attended to as in any `RaggedCache`. The forwards
after it run in a compiled function, which gets the buffers and one line of numbers for each row
(`RowNumbers`), and makes of them what a forward needs: positions, masks over all slots, and a
`StepCache` that writes each row's new keys at its own slots. No number of a step is a Python
number there, so nothing is compiled for it.

Rows behind the active ones are fillers. A filler stays where it ended: it runs tokens whose keys it
writes behind its own last one, where nobody looks, as if all of its drafts had been rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_specdec.caches.cache_layers import (
    RaggedEmptyLayer,
    RaggedLayer,
    RaggedSlidingLayer,
    SharedState,
)
from hf_specdec.caches.ragged_cache import RaggedCache
from hf_specdec.static_shapes import Workspace


class RowNumbers:
    """Columns of the int64 tensor ``[rows, 4]`` that says where each row stands."""

    LENGTH, PADDING, OFFSET, LAST_POSITION = range(4)
    COUNT = 4


class WorkspaceCache(RaggedCache):
    """A `RaggedCache` in a workspace; arguments as there, and:

    Args:
        workspace: for as many rows as there are at least.
        all_slots: all that this call can need, in place of ``num_slots``.
    """

    def __init__(self, workspace: Workspace, all_slots: int, *args: Any, **kwargs: Any):
        self._workspace = workspace
        self._num_made = 0
        super().__init__(*args, **{**kwargs, "num_slots": all_slots})

    def _new_layer(self, window: int | None, layer_type: str | None) -> RaggedLayer:
        number = self._num_made
        self._num_made += 1
        if layer_type is None:
            return RaggedEmptyLayer(self._shared)
        if window is None:
            return _Layer(self._shared, self._workspace, number)
        return _SlidingLayer(self._shared, self._workspace, number, window)

    @property
    def windows(self) -> dict[str, int | None]:
        """The window (or ``None``) of each layer type."""
        return self._windows

    @property
    def host_lengths(self) -> list[int]:
        """Length of each row that is still in the batch."""
        return self._shared.host_lengths

    def unload(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor] | None], int]:
        """See `RaggedCache.unload`; copies, as the buffers serve the next call."""
        states, length = super().unload()
        return [
            None if pair is None else (pair[0].clone(), pair[1].clone()) for pair in states
        ], length


class _InWorkspace(RaggedLayer):
    """Takes its buffers from the workspace."""

    _workspace: Workspace
    number: int

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `RaggedLayer.lazy_initialization`; rows as in the workspace."""
        self.keys = self._buffer("keys", key_states)
        self.values = self._buffer("values", value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _buffer(self, name: str, states: torch.Tensor) -> torch.Tensor:
        shape = (self._workspace.rows, states.shape[1], self._num_slots(), states.shape[3])
        buffer = self._workspace.tensor(f"{name}{self.number}", shape, states.dtype, states.device)
        # An earlier call may have left NaN, which a mask doesn't keep out of a weighted sum.
        return buffer.zero_()

    def sort_rows(self, index: torch.Tensor, length: int) -> None:
        """See `RaggedLayer.sort_rows`; there may be more rows."""
        for buffer in self._buffers().values():
            used = buffer[: len(index), :, :length]
            used.copy_(used[index])


class _Layer(_InWorkspace):
    def __init__(self, shared: SharedState, workspace: Workspace, number: int):
        super().__init__(shared)
        self._workspace, self.number = workspace, number


class _SlidingLayer(_InWorkspace, RaggedSlidingLayer):
    def __init__(self, shared: SharedState, workspace: Workspace, number: int, window: int):
        RaggedSlidingLayer.__init__(self, shared, window)
        self._workspace, self.number = workspace, number


class StepCache(Cache):
    """The cache of one forward inside a compiled function: made there, gone with it.

    Args:
        buffers: for each layer keys and values ``[b, heads, slots, dim]``, or ``None``.
        rings: for each layer the slots of its ring, or ``None`` if it keeps all.
        slots: int64 ``[b, Q]``, where the new tokens go.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        rings: Sequence[int | None],
        slots: torch.Tensor,
    ):
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        layers: list[Any] = [
            _StepLayer(pair, rows, slots if ring is None else slots % ring, ring is not None)
            for pair, ring in zip(buffers, rings, strict=True)
        ]
        super().__init__(layers=layers)


class _StepLayer(CacheLayerMixin):
    """Writes at each row's own slots, and shows the whole buffers."""

    is_sliding = False

    def __init__(
        self,
        buffers: tuple[torch.Tensor, torch.Tensor] | None,
        rows: torch.Tensor,
        slots: torch.Tensor,
        is_sliding: bool,
    ):
        super().__init__()
        if buffers is not None:
            self.keys, self.values = buffers
        self._rows, self._slots = rows, slots
        self.is_sliding = is_sliding
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[b, heads, Q, dim]``; what is hidden of the result is up to the mask."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[self._rows, :, self._slots] = key_states.transpose(1, 2)
        self.values[self._rows, :, self._slots] = value_states.transpose(1, 2)
        return self.keys, self.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers are there."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Never asked, as the masks are given: raises RuntimeError."""
        raise RuntimeError("masks are given in a forward with static shapes")

    def get_seq_length(self) -> int:
        """0: positions are given, and rows have no length in common."""
        return 0

    def get_max_length(self) -> int:
        """No maximum: the slots are given."""
        return -1


def visible_keys(
    slots: torch.Tensor,
    padding: torch.Tensor,
    num_slots: int,
    window: int | None,
    ring: int | None,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Which entries of a layer's buffer each new token sees; `RaggedCache` says why, too.

    Args:
        slots: int64 ``[b, Q]``, of the new tokens.
        padding: int64 ``[b]``.
        num_slots: entries of a layer that keeps all.
        window: of a layer that attends to one, else ``None``.
        ring: entries of such a layer.
        hidden: bool ``[b, num_slots]``, slots that nobody may see besides the padding.

    Returns:
        bool ``[b, 1, Q, entries]``.
    """
    limit = slots[:, None, :, None]
    if ring is None:
        key = torch.arange(num_slots, device=slots.device)[None, None, None]
    else:
        newest = slots[:, -1:]
        index = torch.arange(ring, device=slots.device)
        # Below 0 where nothing has been written yet.
        key = (newest - (newest - index) % ring)[:, None, None]
    visible = (key <= limit) & (key >= padding[:, None, None, None])
    if window is not None:
        visible = visible & (key > limit - window)
    if hidden is not None:
        slot = key.expand(slots.shape[0], 1, 1, -1)[:, 0, 0]
        visible = visible & ~hidden.gather(1, slot.clamp(min=0))[:, None, None]
    return visible
