"""attach: speculate in every ``generate`` call of a model, configured in vLLM's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoModel

from hf_specdec import compatibility
from hf_specdec.config import SpeculativeConfig
from hf_specdec.integration import ATTACHED, Attachment
from hf_specdec.registry import drafter_for, mtp_network


def attach(target: Any, speculative_config: SpeculativeConfig | dict[str, Any] | str) -> Any:
    """Let plain ``target.generate(...)`` speculate; `detach` undoes it.

    A call that brings its own ``assistant_model``, or uses beams, runs as if nothing were attached.

    Args:
        target: the model to speed up (a PreTrainedModel that generates).
        speculative_config: for example ``{"method": "mlp_speculator", "model":
            "ibm-ai-platform/llama3-8b-accelerator", "num_speculative_tokens": 3}``; ``model`` may
            also be a loaded drafter. A Hub id or folder is loaded in the target's dtype, on its
            device. ``{"method": "mtp", "num_speculative_tokens": 1}`` drafts with the target's own
            MTP layers.

    Returns:
        ``target``, for chaining.

    Raises:
        ValueError: a wrong config, or a drafter that doesn't fit the target.
    """
    config = SpeculativeConfig.from_value(speculative_config)
    compatibility.check_target(target)
    assistant = config.model
    if config.method == "mtp":
        if assistant is not None and assistant is not target:
            raise ValueError(
                "method='mtp' drafts with the target's own layers, but speculative_config names a "
                f"model ({assistant!r}). Leave model out, or drop the method."
            )
        assistant = mtp_network(target)
    elif assistant is None:
        raise ValueError(
            "speculative_config has no model: name the drafter's Hub id or folder, or pass a "
            "loaded drafter"
        )
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
    detach(target)
    # Not as an attribute of its own: a module in there would become a part of the target.
    target.__dict__[ATTACHED] = Attachment(assistant, replace(config, model=None))
    return target


def detach(target: Any) -> Any:
    """Let ``target.generate`` be plain again; harmless when nothing is attached."""
    target.__dict__.pop(ATTACHED, None)
    return target
