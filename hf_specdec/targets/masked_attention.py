"""Attention implementations that take no mask for every row: FlashAttention and flex attention.

The prompt runs with the implementation that the target was loaded with. The verifying forward needs
a mask of its own for every row, so there the function steps aside for one that takes it: ``sdpa``,
or the family's eager attention where scores are capped or have sinks. Which of the two calls it is
shows in the mask itself, as these implementations are never given one of four dimensions. So
another thread that runs the same target notices nothing.

For the duration of a call the function is registered under the implementation's own name, through
transformers' public attention interface; what was registered before is put back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask

from hf_specdec.targets.attention import NAME, grouped_sdpa

_FLEX = "flex_attention"
_OWN = ("eager", "sdpa", NAME)

_lock = threading.Lock()
_users: dict[str, int] = {}
_originals: dict[str, Any] = {}


def implementation_of(model: Any) -> str:
    """Name of the attention implementation of a model's decoder."""
    return model.config.get_text_config(decoder=True)._attn_implementation


def steps_aside(name: str) -> bool:
    """Whether an implementation runs prompts only, and another the verifying forward."""
    if name in _OWN or name.startswith("paged|"):
        return False
    if name == _FLEX:
        return True
    function = _originals.get(name) or AttentionInterface().get(name)
    if isinstance(function, partial):
        function = function.func
    is_flash = AttentionMaskInterface().get(name) is flash_attention_mask
    return is_flash and function is flash_attention_forward


def takes_masks(name: str) -> bool:
    """Whether an implementation can be given a mask for every row."""
    if name.startswith("paged|"):
        return False
    return name in _OWN or AttentionMaskInterface().get(name) in (sdpa_mask, eager_mask)


def takes_booleans(name: str) -> bool:
    """Whether masks should say True and False, not what is added to the scores."""
    return name not in _OWN and AttentionMaskInterface().get(name) is sdpa_mask


def check_attention(model: Any) -> None:
    """Raise ValueError if the target's attention can't verify rows of different lengths."""
    name, target = implementation_of(model), type(model).__name__
    if takes_masks(name):
        return
    if not steps_aside(name):
        raise ValueError(
            f"The target {target} uses attn_implementation={name!r}, which takes no per-row "
            "attention mask. Load it with attn_implementation='sdpa' or 'eager'; a function of "
            "your own that takes 4-D masks says so by AttentionMaskInterface.register"
            f"({name!r}, sdpa_mask)."
        )
    config = model.config.get_text_config(decoder=True)
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    for module in model.get_decoder().modules():
        kind = type(module).__name__
        if "FlashAttention" in kind:
            # Chosen by class when the target was made, and called past the interface.
            raise ValueError(
                f"The target {target} with attn_implementation={name!r} has a {kind} of its own, "
                "which takes no per-row attention mask. Load it with attn_implementation='sdpa' or "
                "'eager'."
            )
        if hasattr(module, "sinks") or (is_capped and kind.endswith("Attention")):
            _eager_attention(type(module))


@contextmanager
def row_masks(model: Any) -> Iterator[None]:
    """Let a target whose attention takes no mask for every row take one inside the block.

    Calls in several threads share the function; the last one to leave puts the original back.
    """
    name = implementation_of(model)
    if not steps_aside(name):
        yield
        return
    with _lock:
        _users[name] = _users.get(name, 0) + 1
        if _users[name] == 1:
            _originals[name] = AttentionInterface()[name]
            AttentionInterface.register(name, _stepping_aside(_originals[name]))
    try:
        yield
    finally:
        with _lock:
            _users[name] -= 1
            if _users[name] == 0:
                AttentionInterface.register(name, _originals.pop(name))


# The same object for every call: compiled code is compiled anew for another.
@cache
def _stepping_aside(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> Any:
        function = original
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
            function = grouped_sdpa
            if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
                function = _eager_attention(type(module))
        return function(module, query, key, value, attention_mask, **kwargs)

    return attend


def _eager_attention(layer_class: type[torch.nn.Module]) -> Callable[..., Any]:
    """The function that a family's layers use with ``eager``."""
    module = sys.modules.get(layer_class.__module__)
    function = getattr(module, "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f"The target's {layer_class.__name__} caps its scores or has sinks, and has no eager "
            "attention that verification could use. Load it with attn_implementation='eager'."
        )
    return function
