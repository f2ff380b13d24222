"""The layers of a `RaggedCache`: keys and values in preallocated buffers, whole or as a ring."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.cache_moves import PathMove
from hf_specdec.devices import Copies
from hf_specdec.kernels import runtime


@dataclass
class SharedState:
    """What the layers of a cache know of it.

    They don't know the cache itself: each would keep the other alive in a circle, and a call's keys
    and values would stay until the garbage collector comes by.

    Attributes:
        num_slots: of layers that keep everything.
        max_query_length: the most tokens of a forward behind the prompt.
        host_lengths: of the rows that are still in the batch.
        current_write: of the forward under way.
    """

    num_slots: int
    max_query_length: int
    host_lengths: list[int]
    current_write: Write = field(init=False)

    @property
    def host_length(self) -> int:
        """Length of the longest row."""
        return max(self.host_lengths, default=0)


@dataclass
class Write:
    """Where the tokens of the forward under way go; shared by all layers.

    Attributes:
        slots: int64 ``[n, Q]``.
        end: one past the highest slot written in any row.
        start: the slot of the first token if it is the same in every row, else ``None``.
        prompt: a part of the prompt, which attends through transformers' own masks.
    """

    slots: torch.Tensor
    end: int
    start: int | None
    prompt: bool
    _places: dict[tuple[int, int, int | None, torch.device], torch.Tensor] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._copies = Copies(self.slots)

    def slots_on(self, device: torch.device) -> torch.Tensor:
        """The slots, on the device of a layer."""
        return self._copies.on(device)

    def places(
        self, heads: int, num_slots: int, ring_size: int | None, device: torch.device
    ) -> torch.Tensor:
        """Rows of a buffer ``[B * heads * num_slots, dim]`` to write; once for all alike layers.

        Args:
            heads: of the layer.
            num_slots: that a row of the buffer has.
            ring_size: slots are counted modulo this, and the newest so many are written.
            device: of the buffer.

        Returns:
            int64 ``[n * heads * Q]``.
        """
        key = heads, num_slots, ring_size, device
        if key not in self._places:
            slots = self.slots_on(device)
            if ring_size is not None:
                slots = slots[:, -ring_size:] % ring_size
            rows = torch.arange(slots.shape[0] * heads, device=slots.device) * num_slots
            self._places[key] = (rows.view(-1, heads, 1) + slots[:, None]).flatten()
        return self._places[key]

    @property
    def first(self) -> bool:
        """Whether the buffers are still empty."""
        return self.prompt and self.start == 0


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer that attends to everything."""

    is_sliding = False
    is_croppable = True
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, shared: SharedState):
        super().__init__()
        self._shared = shared

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeroed buffers in the shape, dtype and device of the first states."""
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _num_slots(self) -> int:
        return self._shared.num_slots

    def _buffers(self) -> dict[str, torch.Tensor]:
        """What is allocated so far, by attribute."""
        return {"keys": self.keys, "values": self.values} if self.is_initialized else {}

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty memory: a masked NaN would still poison the weighted sum of the values.
        batch, heads, _, dim = states.shape
        return states.new_zeros(batch, heads, self._num_slots(), dim)

    def grow(self) -> None:
        """Move to larger buffers once the cache has more slots than they hold."""
        for name, old in self._buffers().items():
            if old.shape[2] < self._num_slots():
                new = self._allocate(old)
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states at every row's own slots.

        Args:
            key_states, value_states: ``[n, heads, Q, dim]``.

        Returns:
            Views of the buffers, ``[n, heads, end, dim]``; in the first forward the states
            themselves.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = self._shared.current_write
        self._write_both(key_states, value_states, write)
        if write.first:
            return key_states, value_states
        n = key_states.shape[0]
        end = self._visible(write)
        return self.keys[:n, :, :end], self.values[:n, :, :end]

    def first_kept(self, length: int) -> int:
        """The lowest slot that the token at slot ``length`` can still read."""
        return 0

    def used(self, num_rows: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the buffers of the first rows, as far as slots before ``end`` have been used."""
        return self.keys[:num_rows, :, :end], self.values[:num_rows, :, :end]

    def slots_between(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots ``start .. end - 1`` of every row ever in the batch."""
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def load(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Copy states from elsewhere into the slots before ``end`` (all rows, empty buffers)."""
        self.lazy_initialization(keys, values)
        start = end - keys.shape[2]
        slots = torch.arange(start, end, device=keys.device).expand(keys.shape[0], -1)
        write = Write(slots, end, start, prompt=True)
        self._write_both(keys, values, write)

    def _visible(self, write: Write) -> int:
        return write.end

    def _ring(self, write: Write) -> int | None:
        """Size of the ring that slots are counted in, ``None`` as long as slot s is at index s."""
        return None

    def _write_both(self, keys: torch.Tensor, values: torch.Tensor, write: Write) -> None:
        ring = self._ring(write)
        slices = ring is None and write.start is not None
        if slices or not _kernel_fits(self.keys, self.values, keys, values):
            self._write(self.keys, keys, write)
            self._write(self.values, values, write)
            return
        from hf_specdec.kernels import cache_moves

        slots = write.slots_on(self.keys.device)
        if ring is not None:
            keys, values, slots = keys[:, :, -ring:], values[:, :, -ring:], slots[:, -ring:]
        size = ring or self.keys.shape[2]
        cache_moves.write_ragged(self.keys, self.values, keys, values, slots[:, 0], size)

    def _write(self, buffer: torch.Tensor, states: torch.Tensor, write: Write) -> None:
        ring = self._ring(write)
        if ring is not None:
            # Only the newest tokens of a long prompt are kept.
            states = states[:, :, -ring:]
        elif write.start is not None:
            buffer[: states.shape[0], :, write.start : write.end] = states
            return
        places = write.places(buffer.shape[1], buffer.shape[2], ring, buffer.device)
        _write_rows(buffer, places, states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys, for the masks that transformers builds for the prompt."""
        length = self._shared.host_length
        first = self.first_kept(length)
        return length - first + query_length, first

    def get_seq_length(self) -> int:
        """Tokens in the longest row, padding included."""
        return self._shared.host_length

    def get_max_length(self) -> int:
        """No maximum: the buffers grow."""
        return -1

    def move_rows(self, rows: Copies, swap: bool) -> None:
        """Copy whole rows onto others (int64 ``[moves, 2]``, to and from), or swap them."""
        for buffer in self._buffers().values():
            targets, sources = rows.on(buffer.device).unbind(1)
            overwritten = buffer[targets] if swap else None
            buffer[targets] = buffer[sources]
            if overwritten is not None:
                buffer[sources] = overwritten

    def move_slots(self, move: PathMove) -> None:
        """Move entries of every row to other slots; each buffer counts modulo its own."""
        buffers = self._buffers()
        if not buffers:
            return
        move = move.on(self.keys.device)
        if _kernel_fits(self.keys, self.values, self.keys, self.values):
            from hf_specdec.kernels import cache_moves

            size = self.keys.shape[2]
            cache_moves.move_accepted(self.keys, self.values, move.base, move.path, size)
            del buffers["keys"], buffers["values"]
        for buffer in buffers.values():
            move.apply(buffer, buffer.shape[2])

    def sort_rows(self, index: torch.Tensor, length: int) -> None:
        """Put rows in another order (int64 ``[B]``), as far as slots before ``length`` go."""
        for buffer in self._buffers().values():
            used = buffer[:, :, :length]
            used.copy_(used[index.to(buffer.device)])


class RaggedEmptyLayer(RaggedLayer):
    """The place of a layer that attends with the keys of an earlier one and keeps nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Never called: raises RuntimeError."""
        raise RuntimeError("a layer that shares the keys of another has none to write")


class RaggedIndexedLayer(RaggedLayer):
    """A layer whose attention is sparse: an indexer with keys of its own chooses what is read.

    DeepSeek-V3.2 and GLM-5 (arXiv 2512.02556, section 2). The masks say what may be chosen.
    """

    def __init__(self, shared: SharedState):
        super().__init__(shared)
        # [B, 1, slots, dim]: as keys with one head, so that everything is done as for keys.
        self._index_buffer: torch.Tensor | None = None

    def _buffers(self) -> dict[str, torch.Tensor]:
        buffers = super()._buffers()
        if self._index_buffer is not None:
            buffers["_index_buffer"] = self._index_buffer
        return buffers

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Write the indexer's keys of the forward under way.

        Args:
            states: ``[n, Q, dim]``.

        Returns:
            ``[n, end, dim]``, all of them so far.
        """
        states = states[:, None]
        if self._index_buffer is None:
            self._index_buffer = self._allocate(states)
        write = self._shared.current_write
        self._write(self._index_buffer, states, write)
        if write.first:
            return states[:, 0]
        return self._index_buffer[: states.shape[0], 0, : write.end]

    @property
    def index_keys(self) -> torch.Tensor | None:
        """``[B, slots, dim]`` of every row ever in the batch; ``None`` if the layer has none."""
        return None if self._index_buffer is None else self._index_buffer[:, 0]

    def load_index_keys(self, states: torch.Tensor) -> None:
        """Copy the indexer's keys ``[B, length, dim]`` of the first slots from elsewhere."""
        self._index_buffer = self._allocate(states[:, None])
        self._index_buffer[:, 0, : states.shape[1]] = states


class RaggedSlidingLayer(RaggedLayer):
    """Keys and values of one layer that attends to a window: a ring of window + K + 1 slots."""

    is_sliding = True

    def __init__(self, shared: SharedState, sliding_window: int):
        super().__init__(shared)
        self.sliding_window = sliding_window

    @property
    def ring_size(self) -> int:
        """Slots that are ever in use."""
        return self.sliding_window + self._shared.max_query_length

    def _num_slots(self) -> int:
        return min(self._shared.num_slots, self.ring_size)

    def _visible(self, write: Write) -> int:
        return min(write.end, self.ring_size)

    def _ring(self, write: Write) -> int | None:
        return self.ring_size if write.end > self.ring_size else None

    def first_kept(self, length: int) -> int:
        """See `RaggedLayer.first_kept`: window - 1 tokens before it are visible."""
        return max(0, length - self.sliding_window + 1)

    def slots_between(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RaggedLayer.slots_between`; copies, as a ring isn't in order."""
        index = torch.arange(start, end, device=self.keys.device) % self.keys.shape[2]
        return self.keys[:, :, index], self.values[:, :, index]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RaggedLayer.update`; a prompt that goes on reads the window before it, in order."""
        write = self._shared.current_write
        if write.first or not write.prompt:
            return super().update(key_states, value_states, *args, **kwargs)
        assert write.start is not None
        # Read before it is overwritten: the rest of a prompt can be longer than the ring.
        keys, values = self.slots_between(self.first_kept(write.start), write.start)
        super().update(key_states, value_states, *args, **kwargs)
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


def _kernel_fits(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> bool:
    """Whether one launch can write both."""
    if not runtime.usable(keys, new_keys) or keys.shape[:3] != values.shape[:3]:
        return False
    if not keys.dtype == new_keys.dtype == values.dtype == new_values.dtype:
        return False

    def trial() -> bool:
        # Here, so that a Triton that can't be imported costs a warning and no more.
        from hf_specdec.kernels import cache_moves

        return cache_moves.agrees(keys)

    return runtime.trusted("cache_moves", keys, trial)


def _write_rows(buffer: torch.Tensor, places: torch.Tensor, states: torch.Tensor) -> None:
    """Write ``[n, heads, Q, dim]`` states at their places; see `Write.places`.

    Not ``scatter_``: on CPU it copies the whole buffer, twice, when its index is expanded.
    """
    dim = buffer.shape[-1]
    buffer.view(-1, dim).index_copy_(0, places, states.reshape(-1, dim))
