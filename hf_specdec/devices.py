"""Index tensors that layers on several devices read: moved to each once a step, not once a layer.

With a target on one device nothing here moves or keeps anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Copies:
    """A tensor, and copies of it on the devices that asked for one.

    Args:
        tensor: must not be written to any more.
    """

    def __init__(self, tensor: torch.Tensor):
        self._by_device = {tensor.device: tensor}
        self._tensor = tensor

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor on a device."""
        if device not in self._by_device:
            self._by_device[device] = self._tensor.to(device)
        return self._by_device[device]


@contextmanager
def moved_once(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let ``.to(device)`` of these tensors, and of their copies, copy once for each device.

    accelerate moves what a layer is called with in front of every layer, and so a mask again and
    again. Copies are let go at the end of the block.
    """
    tables: list[dict[torch.device, torch.Tensor]] = []
    try:
        for tensor in tensors:
            tables.append({})
            _keep(tensor, tables[-1])
        yield
    finally:
        for table in tables:
            for tensor in table.values():
                vars(tensor).pop("to", None)
            # A cycle by now; masks are too large to wait for the garbage collector.
            table.clear()


def _keep(tensor: torch.Tensor, table: dict[torch.device, torch.Tensor]) -> None:
    """Put a tensor in the table of its copies, and let it look there for others."""
    move = tensor.to

    def to(*args: Any, **kwargs: Any) -> torch.Tensor:
        # As accelerate asks; other calls are the tensor's own business.
        if len(args) != 1 or isinstance(args[0], torch.dtype) or kwargs.keys() - {"non_blocking"}:
            return move(*args, **kwargs)
        device = torch.device(args[0])
        if device not in table:
            moved = move(*args, **kwargs)
            if moved.device not in table:
                _keep(moved, table)
            table[device] = moved
        return table[device]

    table[tensor.device] = tensor
    tensor.to = to  # type: ignore[method-assign]
