"""Watching what torch computes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Which operators run, and the largest tensor any of them makes."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result
