"""Attention for the verifying forward of targets whose query heads share key heads.

With a mask and more than one query token transformers' ``sdpa`` repeats the keys and values for
every query head, a copy of the whole cache in every layer of every step. Here the query heads of a
group are stacked along the query axis instead, ``[B, groups * Q, ...]`` per key head, and the cache
is read where it is. Registered through transformers' public attention interface and switched on for
the duration of one call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "hf_specdec_grouped_sdpa"

_lock = threading.Lock()
_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot product attention without repeated keys.

    Args:
        module: the layer.
        query: ``[B, H, Q, D]``.
        key, value: ``[B, H / groups, keys, D]``.
        attention_mask: ``[B, 1, Q, keys]``, added to the scores; other masks, and none, go to
            transformers' own function.
        dropout, scaling: as there.
        **kwargs: passed on to it.

    Returns:
        ``[B, Q, H, D]``, and ``None`` for the weights.
    """
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    if groups == 1 or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * length, width),
        key,
        value,
        attn_mask=_for_groups(attention_mask, groups) if length > 1 else attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    output = output.reshape(batch, heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def additive(masks: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Masks as what is added to the scores, in their dtype: 0 where bool masks are True.

    Eager attention wants them so, and sdpa would convert a boolean mask again in every layer.
    """
    return {name: torch.where(mask, *_scores(dtype, mask.device)) for name, mask in masks.items()}


@cache
def _scores(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added for a key that is seen, and for one that isn't: scalars."""
    return (
        torch.zeros((), dtype=dtype, device=device),
        torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device),
    )


def _for_groups(attention_mask: torch.Tensor, groups: int) -> torch.Tensor:
    """The mask once for each query head of a group, made once for all layers of a forward."""
    if torch.compiler.is_compiling():
        # Equal computations are made one there, and tensors take no attributes.
        return attention_mask.repeat(1, 1, groups, 1)
    kept: dict[int, torch.Tensor] | None = getattr(attention_mask, "_hf_specdec_groups", None)
    if kept is None:
        kept = {}
        attention_mask._hf_specdec_groups = kept  # type: ignore[attr-defined]
    if groups not in kept:
        kept[groups] = attention_mask.repeat(1, 1, groups, 1)
    return kept[groups]


AttentionInterface.register(NAME, grouped_sdpa)
# Should transformers ever build a mask while this is on, it builds the one of sdpa.
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Let a model that uses ``sdpa`` use `grouped_sdpa` inside the block; others are left alone.

    Calls in several threads share the switch: the last one to leave puts ``sdpa`` back.
    """
    with _lock:
        users = _users.get(model, 0)
        applies = users > 0 or _can_switch(model)
        if applies:
            _users[model] = users + 1
            if users == 0:
                _switch(model, "sdpa", NAME)
    try:
        yield
    finally:
        if applies:
            with _lock:
                _users[model] -= 1
                if _users[model] == 0:
                    _switch(model, NAME, "sdpa")


def _can_switch(model: Any) -> bool:
    config = model.config.get_text_config()
    # Layers with an indexer look at the name, and would attend to everything under another.
    indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    return config._attn_implementation == "sdpa" and not indexed


def _switch(model: Any, old: str, new: str) -> None:
    # Every layer reads its own config. Those of a multimodal model's other parts stay as they are:
    # some encoders know no attention but eager, and setting an outer config would set theirs too.
    decoder = model.get_decoder()
    configs = {id(m.config): m.config for m in decoder.modules() if hasattr(m, "config")}
    for config in configs.values():
        if getattr(config, "_attn_implementation", None) == old:
            config._attn_implementation = new
