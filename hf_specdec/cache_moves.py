"""Moving the accepted path of a tree to consecutive slots, in place (plain torch, any device).

The nodes of a tree were written one behind the other; those on the accepted path are moved up to
where a chain would have put them, and what stands behind is rolled back as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def move_accepted(
    keys: torch.Tensor, values: torch.Tensor, base: torch.Tensor, path: torch.Tensor, size: int
) -> None:
    """Move a layer's keys and values, in place.

    Args:
        keys, values: ``[B, heads, slots, dim]``, contiguous; the first n rows are meant.
        base: int64 ``[n]``, the slot of each row's root.
        path: int64 ``[n, A]``: the entry at slot ``base[b] + path[b, j]`` moves to slot ``base[b]
            + j``. Never decreasing below j, and what equals j stays where it is.
        size: slots are counted modulo this.
    """
    move = PathMove(base, path)
    for buffer in (keys, values):
        move.apply(buffer, size)


@dataclass
class PathMove:
    """One step's moves, for all layers; see `move_accepted`.

    Attributes:
        base: int64 ``[n]``.
        path: int64 ``[n, A]``.
    """

    base: torch.Tensor
    path: torch.Tensor
    _places: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    _copies: dict[torch.device, PathMove] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = torch.arange(self.path.shape[1], device=self.path.device).expand_as(self.path)
        base = self.base[:, None].expand_as(self.path)
        row = torch.arange(self.path.shape[0], device=self.path.device)[:, None]
        row = row.expand_as(self.path)
        if self.path.device.type == "cpu":
            # Elsewhere the host would have to wait to learn which ones move.
            moves = self.path != steps
            row, base = row[moves], base[moves]
            source, target = self.path[moves], steps[moves]
        else:
            source, target = self.path, steps
        self._row = row.flatten()
        self._source, self._target = (base + source).flatten(), (base + target).flatten()

    def on(self, device: torch.device) -> PathMove:
        """The same moves for buffers on a device."""
        if device == self.path.device:
            return self
        if device not in self._copies:
            self._copies[device] = PathMove(self.base.to(device), self.path.to(device))
        return self._copies[device]

    @property
    def is_empty(self) -> bool:
        """Whether it is known that nothing moves."""
        return self._row.numel() == 0

    def apply(self, buffer: torch.Tensor, size: int) -> None:
        """Move the entries of a buffer ``[B, heads, slots, dim]``, slots modulo ``size``."""
        if self.is_empty:
            return
        _, heads, slots, dim = buffer.shape
        key = heads, slots, size
        if key not in self._places:
            first = self._row[:, None] * heads + torch.arange(heads, device=self._row.device)
            first = first * slots
            self._places[key] = (
                (first + (self._source % size)[:, None]).flatten(),
                (first + (self._target % size)[:, None]).flatten(),
            )
        source, target = self._places[key]
        flat = buffer.view(-1, dim)
        # All are read before any is written.
        flat.index_copy_(0, target, flat.index_select(0, source))
