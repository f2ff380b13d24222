"""Linear layers in the blocked layout that oneDNN computes with, on CPU.

PyTorch keeps a weight row by row, and oneDNN rearranges it inside every call. A forward over a few
tokens reads each weight once, so that this costs as much as the multiplication. `pack_weights`
rearranges once and keeps the result beside the weight: twice the memory of the packed layers,
and in return every forward over a few tokens is faster, with and without a drafter.

Boundary: what a layer computes stays the same up to the order of a sum; nothing here knows about
generation.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_specdec.targets.slow_dtypes import has_kernels_for

# Rows of the input that the layout is chosen for: a few tokens of a few texts.
_ROWS = 16
_DTYPES = (torch.bfloat16, torch.float32)
# Bytes in the middle of a weight that are compared before each use. Writes through ``weight.data``,
# as merging a LoRA adapter does, are counted nowhere; they change nearly all numbers.
_SAMPLE = 256
_Identity = tuple[int, int, bytes]
# Layers by the number under which compiled code knows them.
_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_numbers = itertools.count()


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` with a packed copy of its weight, which serves forwards without gradients.

    `pack_weights` turns layers into these and back. A weight that has changed since, in place or
    for another, makes the layer an ordinary one again; so do copies and pickles of it. Under
    autocast, which computes in another dtype, the ordinary forward is used.
    """

    _packed: Tensor | None = None
    _packed_from: _Identity | None = None
    _number: int

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``, ``[.., in_features]`` to ``[.., out_features]``."""
        if torch.compiler.is_compiling():
            return self._compiled_forward(input)
        if torch.is_grad_enabled() or not self._is_current():
            return nn.Linear.forward(self, input)
        if (
            input.dtype != self.weight.dtype
            or not input.numel()
            or torch.is_autocast_enabled("cpu")
        ):
            return nn.Linear.forward(self, input)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")

    def _compiled_forward(self, input: Tensor) -> Tensor:
        """The same inside compiled code, which asks at each run whether the copy is current."""
        ordinary = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or _is_exporting()
        if ordinary or input.dtype != self.weight.dtype or not input.numel():
            return nn.Linear.forward(self, input)
        return torch.ops.hf_specdec.packed_linear(input, self.weight, self.bias, self._number)

    def _is_current(self) -> bool:
        if self._packed is None:
            return False
        if self._packed_from == _identity(self.weight):
            return True
        _make_ordinary(self)
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the packed copy, which has no storage to be copied or saved."""
        dropped = ("_packed", "_packed_from", "_number")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}


def pack_weights(model: nn.Module) -> int:
    """Keep a packed copy of the weight of every linear layer of a model on CPU.

    For layers whose type is exactly ``nn.Linear``: quantised layers, adapters, and experts that are
    kept as one tensor stay as they are. Weights that change later are noticed (see `PackedLinear`),
    but for a write through ``weight.data`` to a few rows alone; call again to pack them anew.

    Args:
        model: on CPU, in bfloat16 or float32; a target or a drafter.

    Returns:
        Bytes of the packed copies.

    Raises:
        ValueError: a layer that is elsewhere or in another dtype, bfloat16 on a processor that
            oneDNN has no kernels for, one that isn't contiguous, or no linear layer at all.
        RuntimeError: this build of torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError("pack_weights needs a torch that was built with oneDNN")
    layers = [(name, layer) for name, layer in model.named_modules() if _is_linear(layer)]
    if not layers:
        raise ValueError(
            f"model={type(model).__name__} has no nn.Linear to pack (quantized layers stay as they "
            "are)"
        )
    for name, layer in layers:
        _check(name, layer.weight)
    # All of them first: out of memory in the middle leaves the model as it was.
    packed = [
        torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS) for _, layer in layers
    ]
    for (_, layer), copy in zip(layers, packed, strict=True):
        layer.__class__ = PackedLinear
        layer._packed, layer._packed_from = copy, _identity(layer.weight)
        _give_number(layer)
    return sum(layer.weight.nbytes for _, layer in layers)


def unpack_weights(model: nn.Module) -> None:
    """Drop the packed copies; layers that have none are left alone."""
    for layer in model.modules():
        if type(layer) is PackedLinear:
            _make_ordinary(layer)


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Let packed layers compute as ordinary ones for a while, to compare the two."""
    layers: list[Any] = [layer for layer in model.modules() if type(layer) is PackedLinear]
    for layer in layers:
        layer.__class__ = nn.Linear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = PackedLinear


def _is_linear(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, PackedLinear):
        return False
    # torchao leaves the layer as it is, and makes its weight a subclass of Tensor.
    return _is_cut(layer.weight) or not is_traceable_wrapper_subclass(layer.weight)


def _is_cut(weight: Any) -> bool:
    """Whether several ranks hold a weight together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def _make_ordinary(layer: PackedLinear) -> None:
    layer.__dict__.pop("_packed", None)
    layer.__dict__.pop("_packed_from", None)
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def _give_number(layer: PackedLinear) -> None:
    """Name a layer for compiled code; packed again, it keeps its number, and the code its use."""
    number = layer.__dict__.get("_number")
    if number is None or _layers.get(number) is not layer:
        number = layer._number = next(_numbers)
    _layers[number] = layer


def _packed_linear(input: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    layer = _layers.get(number)
    packed = None if layer is None else layer._packed
    if packed is None or layer is None or layer._packed_from != _identity(weight):
        return nn.functional.linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def _is_exporting() -> bool:
    # torch 2.6 doesn't say; programs that are exported there are exported with the operator.
    return getattr(torch.compiler, "is_exporting", bool)()


# A packed copy has no storage, which compiled code needs of whatever it takes: so it takes the
# weight, and an operator that finds the copy by the layer's number.
_library = torch.library.Library("hf_specdec", "FRAGMENT")
_library.define("packed_linear(Tensor input, Tensor weight, Tensor? bias, int number) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")


@torch.library.register_fake("hf_specdec::packed_linear", lib=_library)
def _packed_linear_shape(input: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _identity(weight: Tensor) -> _Identity:
    """Changes when the weight does: its place, a count of the writes to it, and a sample of it."""
    place, middle = weight.data_ptr(), weight.nbytes // 2
    # Through torch's own operations this would take as long as a small multiplication.
    sample = ctypes.string_at(place + middle, min(_SAMPLE, weight.nbytes - middle))
    return place, weight._version, sample


def _check(name: str, weight: Tensor) -> None:
    if _is_cut(weight):
        raise ValueError(
            f"model has {name}.weight cut over several ranks, whose layers run a forward of "
            "their own; pack_weights is for whole models. Leave it out"
        )
    if weight.device.type != "cpu":
        raise ValueError(
            f"model has {name}.weight on {weight.device}; pack_weights is for models on CPU, where "
            "rearranging weights costs time. On other devices leave it out"
        )
    if weight.dtype not in _DTYPES:
        raise ValueError(
            f"model has {name}.weight in {weight.dtype}; pack_weights works in bfloat16 and "
            "float32: load the model with one of them"
        )
    if not weight.is_contiguous():
        raise ValueError(
            f"model has {name}.weight with strides {weight.stride()}, a view of another tensor; "
            "make it its own with .contiguous()"
        )
    if weight.is_inference():
        raise ValueError(
            f"model has {name}.weight made under torch.inference_mode, so changes of it could not "
            "be noticed; load the model outside of it"
        )
    if not has_kernels_for(weight.dtype):
        raise ValueError(
            f"model has {name}.weight in bfloat16, for which oneDNN has no kernels on this "
            "processor; load the model with dtype=torch.float32"
        )
