"""RaggedCache: keys and values of a batch whose rows have different lengths, O(1) roll-back.

Every layer owns one preallocated ``[B, heads, slots, dim]`` buffer. A token's *slot* is its index
in the left-padded prompt, then on; each row has its own length. A forward over Q tokens writes row
b's keys at slots ``lengths[b] .. lengths[b] + Q - 1`` and attends through a 4-D mask. Rolling back
is not lengthening: `advance` adds what was accepted, and what lies behind a row's length is
invisible to the mask and overwritten by the next forward. Nothing is copied, nothing concatenated.

The prompt is written by one forward or by several (chunks, or the part that a given cache lacks),
with the masks that transformers builds for it; all rows are at the same slot until it is over.

Layers that attend to a window are rings of ``window + K + 1`` slots: slot s lives at index s modulo
that size. The K + 1 newest entries can be wrong (rejected) and still no key inside the window has
been overwritten.

A forward may be over a tree of drafts in place of a chain (see `tree`): its nodes are written one
behind the other, each sees the kept tokens and its own ancestors, windows count positions and not
slots, and `keep_path` moves the accepted nodes to where a chain would have put them.

Rows that are finished leave the batch: `keep_rows` moves the last rows into the gaps, one row's
copy for each row that finished, and later forwards read a smaller view of the same buffers. A cache
that is handed out at the end swaps rows instead, so that finished ones aren't lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from hf_specdec.cache_moves import PathMove
from hf_specdec.caches.cache_layers import (
    RaggedEmptyLayer,
    RaggedIndexedLayer,
    RaggedLayer,
    RaggedSlidingLayer,
    SharedState,
    Write,
)
from hf_specdec.devices import Copies
from hf_specdec.tree import TokenTree


class RaggedCache(Cache):
    """A cache for batches whose rows advance by different numbers of tokens.

    Args:
        layer_windows: for each layer its sliding window, or ``None`` if it attends to everything.
        layer_types: for each layer the name under which the model looks up its mask; ``None`` for
            one that keeps nothing, as it attends with the keys of an earlier layer.
        padding: int64 ``[B]``, left padding of each row, on the target's device.
        max_query_length: the most tokens of one forward after the prompt (K + 1, or 1 + N).
        num_slots: slots to allocate at first; more are added by doubling.
        offsets: int64 ``[B]``, slot minus position of the tokens behind the prompt; the left
            padding if not given.
        hidden: bool ``[B, T]``, slots of the prompt that nobody may see, if there are others than
            the left padding.
        retain: keep the keys of rows that leave, for the cache that is handed out.
    """

    def __init__(
        self,
        layer_windows: Sequence[int | None],
        layer_types: Sequence[str | None],
        padding: torch.Tensor,
        max_query_length: int,
        num_slots: int,
        offsets: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        retain: bool = False,
    ):
        self._shared = SharedState(num_slots, max_query_length, [0] * len(padding))
        self.padding = padding
        self.offsets = padding if offsets is None else offsets
        self.hidden = hidden
        self._retain = retain
        # The row of the whole batch that each row of the buffers belongs to.
        self._row_of = list(range(len(padding)))
        self._all_padding, self._all_hidden = padding, hidden
        self.lengths = torch.zeros_like(padding)
        self._windows = {
            layer_type: window
            for layer_type, window in zip(layer_types, layer_windows, strict=True)
            if layer_type is not None
        }
        self._tree: TokenTree | None = None
        self.ragged_layers = [
            self._new_layer(window, layer_type)
            for window, layer_type in zip(layer_windows, layer_types, strict=True)
        ]
        super().__init__(layers=list(self.ragged_layers))

    def _new_layer(self, window: int | None, layer_type: str | None) -> RaggedLayer:
        if layer_type is None:
            return RaggedEmptyLayer(self._shared)
        if layer_type == "indexed_attention":
            return RaggedIndexedLayer(self._shared)
        return (
            RaggedLayer(self._shared)
            if window is None
            else RaggedSlidingLayer(self._shared, window)
        )

    @property
    def host_length(self) -> int:
        """Length of the longest row."""
        return self._shared.host_length

    @property
    def num_slots(self) -> int:
        """Of the buffers of layers that keep everything."""
        return self._shared.num_slots

    @property
    def max_query_length(self) -> int:
        """The most tokens of a forward behind the prompt."""
        return self._shared.max_query_length

    @property
    def current_write(self) -> Write:
        """Where the tokens of the forward under way go."""
        return self._shared.current_write

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the keys, ``None`` before the first forward."""
        first = self.ragged_layers[0]
        return first.dtype if first.is_initialized else None

    @property
    def num_rows(self) -> int:
        """Rows that are still in the batch."""
        return len(self._shared.host_lengths)

    def begin(
        self, query_length: int, prompt: bool = False, tree: TokenTree | None = None
    ) -> torch.Tensor:
        """Announce a forward over ``query_length`` tokens of every row.

        Args:
            query_length: Q.
            prompt: the tokens are a part of the prompt, whose masks transformers builds.
            tree: the tokens are its nodes, not a chain.

        Returns:
            int64 ``[n, Q]``, the position ids of these tokens (padding not counted, never below 0).
        """
        longest, shortest = self.host_length, min(self._shared.host_lengths)
        end = longest + query_length
        if end > self.num_slots:
            self._shared.num_slots = max(2 * self.num_slots, end)
            for layer in self.ragged_layers:
                layer.grow()
        device = self.lengths.device
        slots = self.lengths[:, None] + torch.arange(query_length, device=device)
        self._shared.current_write = Write(
            slots=slots,
            end=end,
            start=longest if longest == shortest else None,
            prompt=prompt,
        )
        self._tree = tree
        places = slots if tree is None else self.lengths[:, None] + tree.depths
        return (places - self.offsets[:, None]).clamp_(min=0)

    def attention_masks(self) -> dict[str, torch.Tensor]:
        """Which keys each token of the announced forward sees, for every layer type.

        Returns:
            bool ``[n, 1, Q, keys]`` by layer type, True where attention is allowed.
        """
        write = self.current_write
        if self._tree is not None:
            return self._tree_masks(self._tree, write.slots, write.end)
        return self._masks(write.slots, write.slots, write.end)

    def kept_masks(self, ahead: int = 0) -> dict[str, torch.Tensor]:
        """Which kept keys a reader sees that stands at each row's last kept token.

        Args:
            ahead: how many slots further it stands; it sees no more for that, and its window moves.

        Returns:
            As `attention_masks`, for one query and the keys that `kept_states` returns.
        """
        last = self.lengths[:, None] - 1
        return self._masks(last + ahead, last, self.host_length)

    def kept_states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[n, heads, keys, dim]`` of a layer: views, with what was rolled back.

        `kept_masks` says what of it may be seen.
        """
        return self.ragged_layers[layer].used(self.num_rows, self.host_length)

    def _masks(self, query: torch.Tensor, limit: torch.Tensor, end: int) -> dict[str, torch.Tensor]:
        """By layer type which keys are visible from slots ``query``, none behind ``limit``.

        Args:
            query, limit: int64 ``[n, Q]``.
            end: one past the highest slot in use in any row.
        """
        masks = {}
        limit, newest = limit[:, None, :, None], limit[:, -1:]
        query = query[:, None, :, None]
        for layer_type, window in self._windows.items():
            key = self._keys(window, newest, end)
            visible = (key <= limit) & self._is_open(key)
            if window is not None:
                visible &= key > query - window
            masks[layer_type] = visible
        return masks

    def _tree_masks(
        self, tree: TokenTree, slots: torch.Tensor, end: int
    ) -> dict[str, torch.Tensor]:
        """By layer type which keys the nodes of a tree see, written at ``slots``, int64 ``[n, Q]``.

        A node stands at the place of its depth, wherever it was written; windows count from there.
        """
        masks = {}
        rows, size = slots.shape
        kept = self.lengths[:, None, None, None]
        depth = tree.depths[:, None, :, None]
        for layer_type, window in self._windows.items():
            key = self._keys(window, slots[:, -1:], end)
            visible = (key < kept) & self._is_open(key)
            nodes = tree.ancestors[:, None]
            if window is not None:
                visible = visible & (key > kept + depth - window)
                nodes = nodes & (depth.transpose(2, 3) > depth - window)
            # In a ring the node's place; elsewhere there are more keys than slots in use.
            column = (slots % visible.shape[-1])[:, None, None].expand(-1, -1, size, -1)
            visible = visible.expand(-1, -1, size, -1)
            masks[layer_type] = visible.scatter(3, column, nodes.expand(rows, -1, -1, -1))
        return masks

    def _keys(self, window: int | None, newest: torch.Tensor, end: int) -> torch.Tensor:
        """Slots of a layer's keys, int64 ``[n or 1, 1, 1, keys]``.

        Args:
            window: of the layer.
            newest: int64 ``[n, 1]``, the highest slot in use in each row.
            end: one past the highest in any row.
        """
        size = end if window is None else window + self.max_query_length
        index = torch.arange(min(end, size), device=newest.device)
        if end <= size:
            return index[None, None, None, :]
        # The ring index holds the newest slot that is congruent to it; or one that was rolled
        # back, at most K further, and then it is taken for one out of the window.
        return (newest - (newest - index) % size)[:, None, None, :]

    def _is_open(self, key: torch.Tensor) -> torch.Tensor:
        """Whether slots ``[n or 1, 1, 1, keys]`` hold tokens that may be seen at all."""
        is_open = key >= self.padding[:, None, None, None]
        if self.hidden is not None:
            last = self.hidden.shape[1] - 1
            slot = key.expand(self.num_rows, 1, 1, -1)[:, 0, 0]
            hidden = self.hidden.gather(1, slot.clamp(0, last)) & (slot <= last)
            is_open &= ~hidden[:, None, None, :]
        return is_open

    def keep_path(self, path: torch.Tensor) -> None:
        """Move the nodes of a path of the last forward's tree to the slots behind its root.

        Args:
            path: int64 ``[n, A]``, the node at each depth, 0 for the root; where the depth itself
                stands nothing moves.
        """
        move = PathMove(self.lengths, path)
        if not move.is_empty:
            for layer in self.ragged_layers:
                layer.move_slots(move)

    def advance(self, num_tokens: torch.Tensor, host_num_tokens: Sequence[int]) -> None:
        """Keep the first ``num_tokens`` of the last forward in each row; the rest is rolled back.

        Args:
            num_tokens: int64 ``[n]`` on the device of the lengths.
            host_num_tokens: the same numbers on the host, so that nothing here waits for a device.
        """
        self.lengths = self.lengths + num_tokens
        self._shared.host_lengths = [
            a + b for a, b in zip(self._shared.host_lengths, host_num_tokens, strict=True)
        ]

    def restart_rows(self, rows: Sequence[int], length: int) -> None:
        """Cut rows back to their first ``length`` tokens, whose keys stay.

        Args:
            rows: indices of the rows.
            length: 0 starts anew; more keeps a beginning that the next tokens share.

        Raises:
            ValueError: a row is shorter than that, or a layer's ring no longer has its beginning.
        """
        if rows and length > min(self._shared.host_lengths[i] for i in rows):
            raise ValueError(f"length={length} is more than the shortest of rows {list(rows)} has")
        if length and any(window is not None for window in self._windows.values()):
            raise ValueError(
                f"length={length}: layers that attend to a window overwrite the beginning of a "
                "row; restart at length 0"
            )
        self.lengths[torch.tensor(rows, device=self.lengths.device, dtype=torch.long)] = length
        for i in rows:
            self._shared.host_lengths[i] = length

    def keep_rows(self, order: Sequence[int]) -> None:
        """Drop rows. Row i of the smaller batch is the present row ``order[i]``.

        Args:
            order: see `compact_order`, which moves as few rows as possible.
        """
        device = self.lengths.device
        moved = [(i, source) for i, source in enumerate(order) if i != source]
        if moved:
            rows = Copies(torch.tensor(moved, device=device))
            for layer in self.ragged_layers:
                layer.move_rows(rows, swap=self._retain)
            for i, source in moved:
                self._row_of[i], self._row_of[source] = self._row_of[source], self._row_of[i]
        index = torch.tensor(order, device=device, dtype=torch.long)
        self.lengths, self.padding = self.lengths[index], self.padding[index]
        self.offsets = self.offsets[index]
        if self.hidden is not None:
            self.hidden = self.hidden[index]
        self._shared.host_lengths = [self._shared.host_lengths[i] for i in order]

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor] | None], length: int) -> None:
        """Begin with keys and values computed elsewhere.

        Args:
            states: for each layer keys and values ``[B, heads, slots, dim]`` of the newest slots
                before ``length``, or ``None`` if it has none.
            length: tokens of every row.
        """
        if length + self.max_query_length > self.num_slots:
            self._shared.num_slots = length + self.max_query_length
        for layer, pair in zip(self.ragged_layers, states, strict=True):
            if pair is not None:
                layer.load(*pair, end=length)
        rows = self.num_rows
        self.advance(self.lengths.new_full((rows,), length), [length] * rows)

    def restore_rows(self, host_lengths: Sequence[int], offsets: torch.Tensor) -> None:
        """Bring back all rows that were ever in the batch, in their first order; needs ``retain``.

        Args:
            host_lengths: what each of them keeps.
            offsets: int64 ``[B]`` of all of them.
        """
        assert self._retain
        if self._row_of != sorted(self._row_of):
            index = torch.tensor(self._row_of, device=self.lengths.device).argsort()
            for layer in self.ragged_layers:
                layer.sort_rows(index, max(host_lengths))
            self._row_of = sorted(self._row_of)
        self._shared.host_lengths = list(host_lengths)
        self.lengths = torch.tensor(self._shared.host_lengths, device=self.lengths.device)
        self.padding, self.offsets, self.hidden = self._all_padding, offsets, self._all_hidden

    def unload(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor] | None], int]:
        """What `load` takes, for the rows in the batch.

        Returns:
            For each layer the keys and values that later tokens can see (views, but for layers with
            a window), and the length of the longest row. What stands behind a shorter row's length
            is unspecified.
        """
        n, end = self.num_rows, self.host_length
        states: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for layer in self.ragged_layers:
            if layer.is_initialized:
                keys, values = layer.slots_between(layer.first_kept(end), end)
                states.append((keys[:n], values[:n]))
            else:
                states.append(None)
        return states, end


def compact_order(keep: Sequence[bool]) -> list[int]:
    """An order of the kept rows in which as few as possible move: gaps are filled from the end.

    >>> compact_order([True, False, True, True])
    [0, 3, 2]
    """
    size = sum(keep)
    spare = [i for i in range(len(keep) - 1, size - 1, -1) if keep[i]]
    order = []
    for i in range(size):
        order.append(i if keep[i] else spare.pop(0))
    return order
