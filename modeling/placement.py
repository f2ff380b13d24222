"""Where the parts of a model compute, when accelerate has spread it over devices or offloaded it.

Between two forwards an offloaded weight is on the device ``meta``, so that its own device says
nothing. accelerate leaves a hook with such a module, which knows where it is executed and where its
weights are kept.

Boundary: questions about loaded modules; nothing is moved but copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes, and so where its outputs are.

    Returns:
        The device ``meta`` only for a module that has no weights anywhere.
    """
    for part in module.modules():
        for hook in reversed(list(_hooks(part))):
            if getattr(hook, "execution_device", None) is not None:
                return torch.device(hook.execution_device)
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if tensor.device.type != "meta":
                return tensor.device
    return torch.device("meta")


def head_device(model: Any) -> torch.device:
    """Where a model computes its logits: a drafter's place."""
    return device_of(model.get_output_embeddings())


def input_device(model: Any) -> torch.device:
    """Where a model expects its prompts."""
    return device_of(model.get_input_embeddings())


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights of a model come from main memory or a disk for every forward."""
    return any(getattr(hook, "offload", False) for part in model.modules() for hook in _hooks(part))


def devices_of(model: Any) -> list[torch.device]:
    """The devices that a model's layers compute on, each once."""
    layers = getattr(model.get_decoder(), "layers", None) or ()
    places = [device_of(layer) for layer in layers]
    return list(dict.fromkeys([*places, input_device(model), head_device(model)]))


def weight_on(module: Any, device: torch.device) -> Tensor:
    """A module's weight on a device: itself, or a copy that is made once and kept.

    Args:
        module: an embedding or a linear layer, offloaded or not.
        device: where the weight is to be read.

    Returns:
        The weight if it is there, else a copy of it, gone with the module; a weight that was
        replaced or written to since is copied anew.
    """
    weight: Tensor = module.weight
    if weight.device == device:
        return weight
    offloaded = weight.device.type == "meta"
    # accelerate makes another parameter of an offloaded weight in every forward.
    state = None if offloaded or weight.is_inference() else weight._version
    kept = _copies.get(module)
    if kept is not None and kept.fits(None if offloaded else weight, state, device):
        return kept.copy
    source = offloaded_weight(module) if offloaded else weight.detach()
    # Tables made inside inference_mode could never be trained with afterwards.
    with torch.inference_mode(False), torch.no_grad():
        copy = source.to(device, weight.dtype)
    _copies[module] = _Copy(None if offloaded else weight, state, copy)
    return copy


@dataclass(frozen=True)
class _Copy:
    origin: Tensor | None
    state: int | None
    copy: Tensor

    def fits(self, origin: Tensor | None, state: int | None, device: torch.device) -> bool:
        return self.origin is origin and self.state == state and self.copy.device == device


_copies: WeakKeyDictionary[nn.Module, _Copy] = WeakKeyDictionary()


def _hooks(module: nn.Module) -> Iterator[Any]:
    """What accelerate has hooked to a module."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def offloaded_weight(module: nn.Module) -> Tensor:
    """An offloaded weight, from where it is kept.

    Raises:
        ValueError: it is kept nowhere.
    """
    for hook in _hooks(module):
        if getattr(hook, "offload", False):
            return hook.weights_map["weight"]
    raise ValueError(
        f"a {type(module).__name__} of the target is on device meta and has no weights. Load the "
        "target with from_pretrained."
    )
