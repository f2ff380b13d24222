"""Which assistant a transformers pipeline gets.

transformers loads an assistant for a pipeline as a language model with a tokenizer, and compares
special tokens of the two models. A speculator or Gemma 4 assistant reads the target's own ids, has
often neither tokenizer nor special tokens, and is loaded as `attach` does it. `integration` puts
the two wrappers in their places.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from hf_specdec.call.resolution import resolve
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.registry import FAMILIES, drafter_for


def assistant_for(target: Any, assistant_model: Any) -> Any | None:
    """The assistant of a pipeline, loaded and checked, or ``None`` if it isn't one of ours.

    Args:
        target: the pipeline's model, where it will stay.
        assistant_model: what was passed to the pipeline: a Hub id, a folder, or a loaded one.

    Raises:
        ValueError: it doesn't fit the target.
    """
    if isinstance(assistant_model, (str, os.PathLike)):
        assistant_model = os.fspath(assistant_model)
        try:
            model_type = PreTrainedConfig.get_config_dict(assistant_model)[0].get("model_type")
        except (OSError, ValueError):
            return None
        if model_type not in FAMILIES:
            return None
    elif drafter_for(assistant_model) is None:
        return None
    return resolve(SpeculativeConfig(model=assistant_model), target).assistant


def load_our_assistants(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' ``load_assistant_model(model, assistant_model, assistant_tokenizer)``."""

    @functools.wraps(original)
    def wrapper(model, assistant_model, assistant_tokenizer):
        if assistant_model is not None and model.can_generate():
            ours = assistant_for(model, assistant_model)
            if ours is not None:
                return ours, None
        return original(model, assistant_model, assistant_tokenizer)

    return wrapper


def pass_our_assistants(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a pipeline's ``_prepare_generate_kwargs(generate_kwargs, **overrides)``.

    Some pipelines, such as image-text-to-text, load an assistant and then forget it.
    """

    @functools.wraps(original)
    def wrapper(self, generate_kwargs, **overrides):
        prepared = original(self, generate_kwargs, **overrides)
        assistant = getattr(self, "assistant_model", None)
        if drafter_for(assistant) is not None:
            prepared = {"assistant_model": assistant, **prepared}
        return prepared

    return wrapper
