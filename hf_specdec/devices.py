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
    tensors = list(tensors)
    tables: list[dict[torch.device, torch.Tensor]] = []

    def remember(tensor: torch.Tensor, table: dict[torch.device, torch.Tensor]) -> None:
        original = tensor.to
        table[tensor.device] = tensor

        def to(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device", args[0] if args else None)
            if isinstance(device, (str, int)):
                device = torch.device(device)
            if not isinstance(device, torch.device) or device not in table:
                moved = original(*args, **kwargs)
                if moved is tensor or moved.dtype != tensor.dtype:
                    return moved
                remember(moved, table)
            return table[device] if isinstance(device, torch.device) else moved

        tensor.to = to  # type: ignore[method-assign]

    for tensor in tensors:
        tables.append({})
        remember(tensor, tables[-1])
    try:
        yield
    finally:
        for table in tables:
            for tensor in table.values():
                del tensor.to
            # A cycle by now; masks are too large to wait for the garbage collector.
            table.clear()
