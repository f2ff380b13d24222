"""Which runner a call's target gets: rows on their own or together, static shapes or not."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.call import compatibility, compile_options
from hf_specdec.call.decoding_settings import DecodingSettings
from hf_specdec.static_shapes import CompileChoice
from hf_specdec.targets.layer_types import attention_layers
from hf_specdec.targets.lockstep import LockstepTarget
from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.static_target import ragged_target
from hf_specdec.targets.target import TargetRunner


def target_runner(
    target: PreTrainedModel,
    prompt: Prompt,
    settings: DecodingSettings,
    max_length: int,
    choice: CompileChoice | None,
    given: Cache | None,
    retain: bool,
) -> tuple[TargetRunner, list[int | None]]:
    """Make the runner of one call.

    Args:
        target: the model.
        prompt: see `Prompt`.
        settings: of the call.
        max_length: slots of the longest row that it can reach.
        choice: how forwards are compiled; ``None``: not at all.
        given: a filled cache that the prompt begins with.
        retain: whether the caller gets the cache.

    Returns:
        The runner, and for each layer the window of its attention or ``None``; none at all where
        rows advance together.
    """
    arguments: dict[str, Any] = {
        "model": target,
        "prompt": prompt,
        "max_query_length": settings.most_draft_tokens + 1,
        "max_length": max_length,
        "collect": settings.outputs.of_model,
        "given": given,
    }
    if compatibility.is_lockstep(target):
        return LockstepTarget(**arguments), []
    widths = compile_options.widths(settings)
    windows, _ = attention_layers(target)
    return ragged_target(choice, widths, retain=retain, **arguments), windows
