"""attach: speculate in every ``generate`` call of a model, configured in vLLM's words."""

from __future__ import annotations

from typing import Any

from hf_specdec.call import compatibility
from hf_specdec.call.resolution import resolve
from hf_specdec.integration import ATTACHED, Attachment
from hf_specdec.metrics import SpeculationTotals
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.targets.adapters import check_adapters
from hf_specdec.targets.wrappers import unwrapped


def attach(target: Any, speculative_config: SpeculativeConfig | dict[str, Any] | str) -> Any:
    """Let plain ``target.generate(...)`` speculate; `detach` undoes it.

    A call that brings its own ``assistant_model``, or uses beams, runs as if nothing were attached.

    Args:
        target: the model to speed up (a PreTrainedModel that generates, also inside a PEFT model
            or what ``torch.compile`` made of it).
        speculative_config: a dict, its JSON text or a `SpeculativeConfig`, for example
            ``{"method": "mlp_speculator", "model": "ibm-ai-platform/llama3-8b-accelerator",
            "num_speculative_tokens": 3}``; ``model`` may also be a loaded drafter. A Hub id or
            folder is loaded in the target's dtype, on its device. ``{"method": "mtp"}``, or a
            config without a model, drafts with the target's own MTP layers.

    Returns:
        ``target``, for chaining.

    Raises:
        ValueError: a wrong config, or a drafter that doesn't fit the target.
    """
    config = SpeculativeConfig.from_value(speculative_config)
    check_adapters(target)
    model = unwrapped(target)
    compatibility.check_target(model)
    resolution = resolve(config, model)
    detach(model)
    # Not as an attribute of its own: a module in there would become a part of the target.
    model.__dict__[ATTACHED] = Attachment(resolution.assistant, resolution.config)
    return target


def detach(target: Any) -> Any:
    """Let ``target.generate`` be plain again; harmless when nothing is attached."""
    unwrapped(target).__dict__.pop(ATTACHED, None)
    return target


def speculation_totals(target: Any) -> SpeculationTotals:
    """What speculation did in all calls of an attached target, since `attach`.

    Calls that draft with the attached drafter are counted when they return, from any thread; a
    call that fails, or brings its own ``assistant_model``, isn't.

    Raises:
        ValueError: nothing is attached.
    """
    attachment = unwrapped(target).__dict__.get(ATTACHED)
    if attachment is None:
        raise ValueError(
            f"target: nothing is attached to this {type(target).__name__}, so nothing is counted. "
            "Call hf_specdec.attach(target, ...) first; a single call's statistics are in its "
            "output's speculation"
        )
    return attachment.totals
