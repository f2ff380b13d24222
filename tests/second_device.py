"""Several devices on a machine that has one: tensors on the CPU that say they are elsewhere.

Inside `separate_devices` the devices ``lazy:0``, ``lazy:1``, ... exist. (A type that torch knows
and that no build of it computes on; nothing is registered, so that other tests see none of it.) As
on GPUs an operation whose tensors are on different devices raises RuntimeError; only copies go from
one to another, and a CPU tensor of one number goes with anything. What is computed is what the CPU
computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import dispatch_model
from torch.utils._python_dispatch import TorchDispatchMode

TYPE = "lazy"
FIRST, SECOND = torch.device(TYPE, 0), torch.device(TYPE, 1)
CPU = torch.device("cpu")
# Reading, writing and copying across devices; everything else stays on one.
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_local_scalar_dense", "aten::set_"}


class Elsewhere(torch.Tensor):
    """A tensor of one of the imitated devices; ``inner`` has the numbers, on the CPU."""

    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: Any = None, requires_grad: bool = False):
        if device is None:
            # accelerate makes a parameter by calling the class of the old one.
            return torch.nn.Parameter(inner, requires_grad=requires_grad)
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_indexed(device),
        )
        self.inner = inner
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def new_tensor(  # type: ignore[override]
        self, data: Any, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        # torch's own asks which device is current, which these have no notion of.
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.inner}, device={self.device})"


class _Devices(TorchDispatchMode):
    """Makes tensors on the imitated devices, and checks where operations take theirs from.

    Attributes:
        copies: how many tensors went from one device to another, by the names of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, self.copies)


def _run(func: Any, args: Any, kwargs: dict[str, Any], copies: Counter | None = None) -> Any:
    name = func._schema.name
    tensors: list[torch.Tensor] = []
    inner = [_unwrapped(x, tensors) for x in args]
    inner_kwargs = {key: _unwrapped(x, tensors) for key, x in kwargs.items()}
    device = _device_of(name, tensors)
    wanted = kwargs.get("device")
    if wanted is not None:
        wanted = _indexed(wanted)
        if wanted.type == TYPE:
            inner_kwargs["device"] = CPU
    if copies is not None and name in _COPIES:
        _count(copies, name, tensors, wanted)
    if name == "aten::histc" and not inner[0].is_floating_point():
        # GPUs count integers, CPUs don't.
        return Elsewhere(func(inner[0].float(), *inner[1:], **inner_kwargs).int(), device)
    result = func(*inner, **inner_kwargs)
    place = device if wanted is None else wanted
    if place.type != TYPE:
        return result
    if func._schema.is_mutable and "out" not in kwargs and isinstance(result, torch.Tensor):
        # In place, as far as models do that: the object is the same, and so is its shape.
        assert args[0].shape == result.shape, f"{name} changes a shape in place"
        return args[0]
    return _wrapped(result, place)


def _unwrapped(value: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument as the CPU computes with it; tensors in it are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.inner if isinstance(value, Elsewhere) else value
    if isinstance(value, (list, tuple)):
        return [_unwrapped(x, tensors) for x in value]
    return value


def _wrapped(result: Any, device: torch.device) -> Any:
    if isinstance(result, torch.Tensor):
        return Elsewhere(result, device)
    if isinstance(result, (list, tuple)):
        return type(result)([_wrapped(x, device) for x in result])
    return result


def _device_of(name: str, tensors: list[torch.Tensor]) -> torch.device:
    """Where an operation computes.

    Raises:
        RuntimeError: its tensors are on several devices.
    """
    # A number on the CPU goes with everything, one elsewhere doesn't.
    places = [x.device for x in tensors if x.dim() or x.device.type != "cpu"]
    if name not in _COPIES and len(set(places)) > 1:
        shown = ", ".join(f"{list(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {shown}")
    return places[0] if places else CPU


def _count(copies: Counter, name: str, tensors: list[Any], wanted: torch.device | None) -> None:
    if name == "aten::_to_copy" and wanted is not None:
        ends = tensors[0].device, wanted
    elif name == "aten::copy_":
        ends = tensors[1].device, tensors[0].device
    elif name == "aten::_local_scalar_dense":
        ends = tensors[0].device, CPU
    else:
        return
    if ends[0] != ends[1]:
        copies[str(ends[0]), str(ends[1])] += 1


def _indexed(device: Any) -> torch.device:
    device = torch.device(device)
    if device.type == TYPE and device.index is None:
        return FIRST
    return device


@contextmanager
def separate_devices() -> Iterator[_Devices]:
    """Let `FIRST` and `SECOND` exist in the block."""
    lift = torch._C._only_lift_cpu_tensors()
    # As for FakeTensors: torch.tensor(..., device=...) makes it on the CPU and then moves it.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Devices() as devices:
            yield devices
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)


def spread(model: Any, *on_first: str, **kwargs: Any) -> Any:
    """Put some of a model's blocks on the first device and the rest on the second.

    Args:
        model: modified in place.
        *on_first: a block goes there if its name has one of these in it.
        **kwargs: of ``dispatch_model``.
    """
    places = {
        name: FIRST if any(part in name for part in on_first) else SECOND
        for name in block_names(model)
    }
    skip_keys = model._skip_keys_device_placement
    return dispatch_model(model, places, main_device=FIRST, skip_keys=skip_keys, **kwargs)


def block_names(model: Any) -> list[str]:
    """The modules that a device map of a model names: layers, and what stands beside them."""
    layers = _layers(model)

    def names(module: torch.nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            if child is layers or any(part is layers for part in child.modules()):
                yield from names(child, f"{path}{name}.")
            else:
                yield f"{path}{name}"

    return list(names(model, ""))


def _layers(model: Any) -> Any:
    decoder = model.get_decoder()
    return decoder.layers if hasattr(decoder, "layers") else decoder.h
