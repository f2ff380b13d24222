"""How far a call reaches: rotary frequencies that change with the length of the text.

Most kinds of rotary embeddings turn a token by its position alone, within the trained length and
beyond it. Two don't: ``dynamic`` computes new frequencies for every length beyond the trained one,
and ``longrope`` has a set for texts beyond it and one for shorter texts. Keys in the cache keep
those of their time, so the text that plain generation gives depends on the forwards that it took
to get there, and a forward over several tokens, or over rows of several lengths, gives another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_specdec.targets.prompt import Prompt


def check_reach(
    target: Any, prompt: Prompt, max_length: int, held: int = 0, chunk_size: int | None = None
) -> None:
    """Raise ValueError if rotary frequencies would change in the middle of a call.

    Args:
        target: the model.
        prompt: see `Prompt`.
        max_length: slots of the longest row that the call can reach.
        held: tokens of the prompt that a given cache holds.
        chunk_size: tokens of a forward over the prompt, if it is cut.
    """
    config = target.config.get_text_config(decoder=True)
    for rope in _changing(config):
        lengths = [prompt.num_slots - n for n in prompt.offsets.tolist()]
        reach = max(lengths) + max_length - prompt.num_slots
        if "dynamic" in rope["rope_type"]:
            _check_dynamic(type(target).__name__, config.max_position_embeddings, reach)
        else:
            limit = rope["original_max_position_embeddings"]
            starts_short = 0 < held <= limit or (chunk_size or limit + 1) <= limit
            is_long = min(lengths) > limit and not starts_short
            _check_longrope(type(target).__name__, limit, reach, max(lengths), is_long)


def _check_dynamic(name: str, limit: int, reach: int) -> None:
    if reach > limit:
        raise ValueError(
            f"The target {name} has rope_type='dynamic', whose frequencies change with every token "
            f"beyond max_position_embeddings={limit}, and this call can reach {reach} tokens. Set "
            f"max_new_tokens so that prompt and answer have at most {limit}, load the target with "
            "rope_type='yarn', or call generate() without assistant_model."
        )


def _check_longrope(name: str, limit: int, reach: int, longest: int, is_long: bool) -> None:
    if reach > limit and not is_long:
        room = limit - longest
        shorter = f"Set max_new_tokens to at most {room}, or call" if room > 0 else "Call"
        raise ValueError(
            f"The target {name} has rope_type='longrope', whose frequencies change at "
            f"{limit} tokens (original_max_position_embeddings); the prompts have up to {longest} "
            f"and this call can reach {reach}. {shorter} generate() without assistant_model; "
            "batches of prompts that are all longer, run at once, do work."
        )


def _changing(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters whose frequencies depend on the length; of most models none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # By layer type in some models.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type") or ""
        if "dynamic" in kind or kind == "longrope":
            yield rope
