"""Whether a call runs with static shapes, and how they are compiled: transformers' words.

``cache_implementation="static"`` asks for it. As in transformers, the forward is then compiled on
CUDA unless the call says ``disable_compile``, and ``compile_config`` says how. Elsewhere it is
compiled if the call gives a ``compile_config``. Where nothing is compiled, static shapes would only
cost, so that buffers that grow are used; the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from hf_specdec.call import compatibility
from hf_specdec.call.decoding_settings import DecodingSettings
from hf_specdec.modeling.placement import is_offloaded
from hf_specdec.options.schedule import AUTO
from hf_specdec.outputs import OutputRequest
from hf_specdec.static_shapes import CompileChoice
from hf_specdec.targets.layer_types import attention_layers
from hf_specdec.targets.recorded_states import can_record

logger = logging.get_logger(__name__)

# transformers' modes that record CUDA graphs, and what they are without them.
_GRAPH_MODES = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}


def compile_choice(
    config: GenerationConfig,
    target: PreTrainedModel,
    outputs: OutputRequest,
    feed: str,
    drafts_trees: bool = False,
) -> CompileChoice | None:
    """How a call's forwards are compiled; ``None``: not at all, and its shapes aren't static.

    Args:
        config: of the call.
        target: the model.
        outputs: what the call returns besides the tokens.
        feed: which state of the target the drafter reads.
        drafts_trees: whether the call drafts trees, whose masks and moves aren't compiled.

    Raises:
        ValueError: a ``compile_config`` with ``dynamic=True``.
    """
    wanted, on_cuda = config.compile_config, target.device.type == "cuda"
    if config.disable_compile or (wanted is None and not on_cuda):
        return None
    if wanted is not None and wanted.dynamic:
        raise ValueError(
            "compile_config has dynamic=True, but with assistant_model what is compiled has static "
            "shapes. Leave dynamic unset, or leave compile_config out"
        )
    if config.cache_implementation != "static":
        if wanted is not None:
            _warn("cache_implementation isn't 'static'")
        return None
    reason = "candidate trees are drafted" if drafts_trees else _obstacle(target, outputs, feed)
    if reason is not None:
        _warn(reason)
        return None
    return _choice(wanted, on_cuda)


def widths(settings: DecodingSettings) -> list[int]:
    """The query lengths to compile a verifying forward for, in order: few, as each costs time.

    Args:
        settings: of the call. Steps that look drafts up are wider than the drafter's. Under
            ``"auto"`` steps without a draft are worth a function of their own, since they are what
            it falls back to; so is every K of a schedule by batch size.
    """
    length = settings.draft_length
    most = length.limit
    kept = {most, settings.most_draft_tokens}
    if length.schedule == AUTO:
        kept.add(0)
    for _, _, k in length.per_batch_size or ():
        kept.add(min(k, most))
    return [k + 1 for k in sorted(kept)]


def _choice(wanted: Any, on_cuda: bool) -> CompileChoice:
    if wanted is None:
        return CompileChoice(graphs=on_cuda)
    options: Sequence[tuple[str, Any]] = sorted((wanted.options or {}).items())
    mode = _GRAPH_MODES.get(wanted.mode, wanted.mode)
    return CompileChoice(
        backend=wanted.backend,
        # torch takes one of the two, and transformers' default is a mode.
        mode=None if options or wanted.backend != "inductor" else mode,
        options=tuple(options) or None,
        fullgraph=wanted.fullgraph,
        graphs=on_cuda and wanted.mode in _GRAPH_MODES,
    )


def _obstacle(target: PreTrainedModel, outputs: OutputRequest, feed: str) -> str | None:
    """Why this call can't have static shapes, or ``None``."""
    name = type(target).__name__
    if is_offloaded(target):
        return f"weights of {name} are offloaded, and fetched for every forward"
    if target.device.type not in ("cpu", "cuda"):
        return f"the target is on {target.device.type}"
    if compatibility.is_lockstep(target):
        return f"{name} has recurrent layers, whose steps run again what was kept of the last one"
    if "indexed_attention" in attention_layers(target)[1]:
        return f"{name} has layers with an indexer"
    if any(outputs.of_model.values()):
        return "the call returns hidden states or attentions of all layers"
    quantizer = getattr(target, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return f"{name} is quantized in a way that can't be compiled"
    devices = set(getattr(target, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"{name} is spread over devices {sorted(map(str, devices))}"
    if not can_record(target, feed):
        return f"the forward of {name} has been replaced, so its states can't be read in it"
    return None


def _warn(reason: str) -> None:
    logger.warning_once(
        f"Nothing is compiled, and shapes are not static, as {reason}. The tokens are the same."
    )
