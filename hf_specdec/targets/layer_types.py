"""What the layers of a target attend to, and what of it can be rolled back."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

_LAYER_TYPES = ("full_attention", "sliding_attention", "indexed_attention")
# What transformers calls a layer without a state of its own.
_STATELESS = "dummy"


def attention_layers(model: PreTrainedModel) -> tuple[list[int | None], list[str | None]]:
    """Window (or ``None``) and layer type of each layer of the target's cache.

    A layer that attends with the keys of an earlier one (Gemma 3n, Gemma 4) has its window, but
    ``None`` for the type of its cache.

    Raises:
        ValueError: a layer keeps a state that has no place in a `RaggedCache`.
    """
    config: Any = model.config.get_text_config(decoder=True)
    types, kwargs = get_layer_types_and_kwargs(config)
    windows = [layer_kwargs.get("sliding_window") for layer_kwargs in kwargs]
    kept: list[str | None] = list(types)
    for i, mode in enumerate(getattr(config, "kv_sharing_modes", None) or ()):
        if mode == "reuse" and types[i] == _STATELESS:
            kept[i] = None
            if config.layer_types[i] == "sliding_attention":
                windows[i] = config.per_layer_config[i].sliding_window
    unsupported = sorted({name for name in kept if name is not None} - set(_LAYER_TYPES))
    if unsupported:
        raise ValueError(
            f"The target {type(model).__name__} has layers of type {', '.join(unsupported)}, whose "
            "state can't be rolled back after a rejected draft. Speculation works with targets "
            f"whose layers are {', '.join(_LAYER_TYPES)}; call generate() without assistant_model "
            "for this one."
        )
    return windows, kept
