"""A model whose hidden states can be read inside compiled code, without a hook.

Hooks that are added for a call are new objects, for which compiled code is compiled anew; hooks
that stay would be seen by whoever uses the model otherwise. So this is a second model object: it
shares all modules with the first but the one whose states are wanted, which a `Recorder` wraps, and
those on the way to it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_specdec.modeling.mtp import final_norm


class Recorder(nn.Module):
    """Calls a module, and keeps what it was called with.

    Args:
        module: the output head, or the final norm.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.states: Any = None

    @property
    def weight(self) -> Any:
        """The module's."""
        return self.module.weight

    @property
    def bias(self) -> Any:
        """The module's."""
        return self.module.bias

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the module."""
        self.states = states
        return self.module(states, *args, **kwargs)


class RecordedModel:
    """The second model object.

    Args:
        model: the first, which stays as it is.
        feed: ``"post_norm"``: what its head is called with; ``"pre_norm"``: what its final norm is.

    Attributes:
        model: the second; calling it leaves the states with the recorder.
        recorder: where they are.

    Raises:
        ValueError: the module isn't in the model, or `can_record` says no.
    """

    def __init__(self, model: nn.Module, feed: str):
        self._feed = feed
        # Weak: this is kept in a table that lets go of a model when nobody else has it.
        self._original = weakref.ref(model)
        module = _module_of(model, feed)
        path = next((name for name, m in model.named_modules() if m is module), None)
        if path is None or not can_record(model, feed):
            raise ValueError(f"{type(model).__name__} can't be recorded behind its {feed} state")
        self.recorder = Recorder(module)
        self._path = path.split(".")
        self._copies = [twin(m) for m in _along(model, self._path)]
        self.model: Any = self._copies[0]
        self.follow()

    def follow(self) -> bool:
        """Take over what has changed in the first model.

        Returns:
            Whether that was possible; not if it has another head or norm now.
        """
        model = self._original()
        if model is None or _module_of(model, self._feed) is not self.recorder.module:
            return False
        below: list[nn.Module] = [*self._copies[1:], self.recorder]
        originals = _along(model, self._path)
        for own, original, name, child in zip(
            self._copies, originals, self._path, below, strict=True
        ):
            modules = {**original._modules, name: child}
            if own.__dict__.get("_modules") != modules or own._modules is original._modules:
                own.__dict__["_modules"] = modules
            for attribute, value in original.__dict__.items():
                if attribute != "_modules" and own.__dict__.get(attribute) is not value:
                    own.__dict__[attribute] = value
        return True


def can_record(model: nn.Module, feed: str = "post_norm") -> bool:
    """Whether the modules on the way call what they contain: not if a forward was replaced."""
    module = _module_of(model, feed)
    path = next((name for name, m in model.named_modules() if m is module), None)
    if path is None:
        return False
    along = _along(model, path.split("."))
    # The outermost one runs uncompiled meanwhile; what was compiled further in would not see this.
    compiled = any(m.__dict__.get("_compiled_call_impl") is not None for m in along[1:])
    return not compiled and not any("forward" in m.__dict__ for m in along)


def twin(module: nn.Module) -> nn.Module:
    """Another object with the same attributes; made without its class's ways to copy."""
    other = type(module).__new__(type(module))
    other.__dict__.update(module.__dict__)
    return other


def _along(model: nn.Module, path: list[str]) -> list[nn.Module]:
    """The modules that contain the one at this path, from the outermost on."""
    modules = [model]
    for name in path[:-1]:
        child = modules[-1]._modules[name]
        assert child is not None
        modules.append(child)
    return modules


def _module_of(model: Any, feed: str) -> Any:
    return model.get_output_embeddings() if feed == "post_norm" else final_norm(model)
