"""Whether Triton kernels can run on given tensors, and the trial each must pass before it is used.

``HF_SPECDEC_KERNELS=0`` turns all of them off. With ``TRITON_INTERPRET=1`` they run on CPU tensors,
slowly, which is how they are tested without a GPU.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

SWITCH = "HF_SPECDEC_KERNELS"

_lock = threading.Lock()
_verdicts: dict[tuple[str, torch.device, torch.dtype], bool] = {}


@cache
def installed() -> bool:
    """Whether Triton can be imported; nothing is imported by asking."""
    return find_spec("triton") is not None


@cache
def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter, on CPU tensors."""
    return installed() and os.environ.get("TRITON_INTERPRET") == "1"


def usable(*tensors: torch.Tensor) -> bool:
    """Whether kernels can run on these tensors: all on one CUDA device, or interpreted on CPU."""
    device = tensors[0].device
    if device.type == "cpu" and not interpreted():
        return False  # first, as it is asked for every layer's keys
    if not installed() or os.environ.get(SWITCH) == "0":
        return False
    if any(t.device != device for t in tensors):
        return False
    return device.type in ("cpu", "cuda")


def trusted(name: str, like: torch.Tensor, trial: Callable[[], bool]) -> bool:
    """Whether a kernel has agreed with its twin on this device and dtype; tried once a process.

    Args:
        name: of the kernel.
        like: a tensor of the device and dtype it is to run on.
        trial: compares kernel and twin on small inputs of that device and dtype; a kernel that
            can't be compiled or launched here raises in it.
    """
    key = (name, like.device, like.dtype)
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = _passes(name, like, trial)
        return _verdicts[key]


def _passes(name: str, like: torch.Tensor, trial: Callable[[], bool]) -> bool:
    try:
        agrees, reason = trial(), "its results differ from plain torch"
    except Exception as error:  # whatever a compiler or driver raises
        agrees, reason = False, f"it failed with {type(error).__name__}: {error}"
    if not agrees:
        warnings.warn(
            f"The Triton kernel {name!r} isn't used on {like.device} in {like.dtype}: {reason}. "
            f"Plain torch does its work. {SWITCH}=0 turns all kernels off and this warning too.",
            RuntimeWarning,
            stacklevel=3,
        )
    return agrees
