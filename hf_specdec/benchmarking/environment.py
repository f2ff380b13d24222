"""What the numbers were measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_specdec._version import __version__
from hf_specdec.benchmarking.memory import MemoryKind
from hf_specdec.modeling.placement import input_device

_CPU_INFO = Path("/proc/cpuinfo")


def describe_environment(target: Any, memory: MemoryKind) -> dict[str, Any]:
    """Machine, precision and versions.

    Args:
        target: the measured model.
        memory: what the report's peaks are.
    """
    device: torch.device = input_device(target)
    environment: dict[str, Any] = {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device.type,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "memory": memory,
        "hf_specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    quantizer = getattr(target, "hf_quantizer", None)
    if quantizer is not None and getattr(target, "is_quantized", False):
        method = quantizer.quantization_config.quant_method
        environment["quantization"] = str(getattr(method, "value", method))
    if device.type == "cuda":
        environment["gpu"] = torch.cuda.get_device_name(device)
        environment["cuda"] = torch.version.cuda
    return environment


def processor_name() -> str:
    """The CPU's name, or what Python knows of it."""
    try:
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
