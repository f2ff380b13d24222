"""The most memory that was in use while something ran."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import torch

T = TypeVar("T")
MemoryKind = Literal["cuda allocated", "resident", "resident since the process began", "unknown"]
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Of proc(5): sets the peak to what is resident now.
_RESET_PEAK = "5"


class PeakMemory:
    """Measures peaks in bytes: of torch's allocator on a GPU, else of the whole process.

    Args:
        device: where the models are.

    Attributes:
        kind: what the numbers are. Linux can reset the process's peak; elsewhere it only grows, and
            Windows doesn't tell.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.kind: MemoryKind = "unknown"
        if device.type == "cuda":
            self.kind = "cuda allocated"
        elif self._reset_resident():
            self.kind = "resident"
        elif sys.platform != "win32":
            self.kind = "resident since the process began"

    def of(self, call: Callable[[], T]) -> tuple[int | None, T]:
        """The peak while ``call`` runs, ``None`` if unknown, and its result."""
        if self.kind == "cuda allocated":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.kind == "resident":
            self._reset_resident()
        result = call()
        return self._read(), result

    def _read(self) -> int | None:
        if self.kind == "cuda allocated":
            return torch.cuda.max_memory_allocated(self._device)
        if self.kind == "resident":
            return _kilobytes("VmHWM") * 1024
        if self.kind == "unknown":
            return None
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # In bytes on macOS, in kilobytes elsewhere.
        return peak if sys.platform == "darwin" else peak * 1024

    @staticmethod
    def _reset_resident() -> bool:
        """Whether the kernel let the process reset its peak."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
            _kilobytes("VmHWM")
        except (OSError, ValueError):
            return False
        return True


def _kilobytes(name: str) -> int:
    """A line of /proc/self/status."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"{_STATUS} has no {name}")
