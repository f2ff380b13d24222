"""attach: speculate in every ``generate`` call of a model, configured in vLLM's words."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoModel

from hf_specdec import compatibility
from hf_specdec.config import SpeculativeConfig
from hf_specdec.integration import drafter_for


def attach(target: Any, speculative_config: SpeculativeConfig | dict[str, Any] | str) -> Any:
    """Let plain ``target.generate(...)`` speculate; `detach` undoes it.

    A call that brings its own ``assistant_model``, or uses beams, runs as if nothing were attached.

    Args:
        target: the model to speed up (a PreTrainedModel that generates).
        speculative_config: for example ``{"method": "mlp_speculator", "model":
            "ibm-ai-platform/llama3-8b-accelerator", "num_speculative_tokens": 3}``; ``model`` may
            also be a loaded drafter. A Hub id or folder is loaded in the target's dtype, on its
            device.

    Returns:
        ``target``, for chaining.

    Raises:
        ValueError: a wrong config, or a drafter that doesn't fit the target.
    """
    config = SpeculativeConfig.from_value(speculative_config)
    compatibility.check_target(target)
    if config.model is None:
        raise ValueError(
            "speculative_config has no model: name the drafter's Hub id or folder, or pass a "
            "loaded drafter"
        )
    assistant = config.model
    if isinstance(assistant, str):
        device = target.get_output_embeddings().weight.device
        assistant = AutoModel.from_pretrained(assistant, dtype=target.dtype).to(device)
    drafter = drafter_for(assistant)
    if drafter is None:
        raise ValueError(
            f"speculative_config.model={config.model!r} is a {type(assistant).__name__}, which "
            "hf_specdec has no drafter for; pass it to generate(assistant_model=...) instead"
        )
    drafter.check(target)
    if config.num_speculative_tokens is not None:
        compatibility.check_num_draft_tokens(
            config.num_speculative_tokens, drafter, "num_speculative_tokens"
        )
    assistant.speculative_config = config
    detach(target)
    plain = target.generate

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        beams = kwargs.get("num_beams") or getattr(
            kwargs.get("generation_config") or target.generation_config, "num_beams", None
        )
        if (beams or 1) == 1 and kwargs.get("custom_generate") is None:
            kwargs.setdefault("assistant_model", assistant)
        return plain(*args, **kwargs)

    target.generate = generate
    return target


def detach(target: Any) -> Any:
    """Give ``target`` its own ``generate`` back; harmless when nothing is attached."""
    target.__dict__.pop("generate", None)
    return target
