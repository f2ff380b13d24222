"""What is refused before any forward, and why: each message names the argument and a way out."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specdec import attention
from hf_specdec.drafters import Drafter
from hf_specdec.target import attention_layers

_ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa", attention.NAME)
_NOT_COLLECTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def check_target(target: PreTrainedModel) -> None:
    """Raise ValueError if the target can't verify several tokens at once and roll back."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"The target {name} is an encoder-decoder model; this assistant_model drafts for "
            "decoder-only models. Call generate() without it."
        )
    if getattr(target, "_is_stateful", False):
        raise ValueError(
            f"The target {name} keeps a recurrent state that can't be rolled back after a rejected "
            "draft. Call generate() without assistant_model."
        )
    attention_layers(target)
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise ValueError(
            f"The target {name} takes no position_ids, so rows of different lengths can't be "
            "verified together. Call generate() without assistant_model."
        )
    implementation = target.config.get_text_config()._attn_implementation
    if implementation not in _ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"The target {name} uses attn_implementation={implementation!r}, which takes no "
            "per-row attention mask. Load it with attn_implementation='sdpa' or 'eager'."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"The target {name} has no output embeddings (lm_head) to read.")


def check_num_draft_tokens(value: Any, drafter: Drafter, source: str) -> int:
    """Check K.

    Args:
        value: what was asked for.
        drafter: limits it.
        source: the argument's name in messages.

    Raises:
        ValueError: not an integer from 0 to the drafter's limit.
    """
    most = drafter.max_draft_tokens
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(
            f"{source}={value!r} must be an integer from 0 to {most}, the number of tokens that "
            f"this assistant_model can draft (0 decodes without drafts)"
        )
    return value


def check_generation_config(config: GenerationConfig) -> None:
    """Raise ValueError for settings under which this loop would not do what they say."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams} doesn't combine with assistant_model: drafts are "
            "verified for greedy decoding and sampling. Set num_beams=1 or drop assistant_model."
        )
    if not config.use_cache:
        raise ValueError("use_cache=False: drafts are verified with a cache. Set use_cache=True.")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} isn't available together with "
            "assistant_model, which brings a cache of its own. Leave it unset."
        )
    if config.prefill_chunk_size is not None:
        raise ValueError(
            f"prefill_chunk_size={config.prefill_chunk_size} isn't available together with "
            "assistant_model. Leave it unset."
        )
    for name in _NOT_COLLECTED:
        if getattr(config, name, None):
            raise ValueError(
                f"{name}=True isn't available together with assistant_model. Drop it, or call "
                "generate() without assistant_model."
            )


def check_inputs(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, model_kwargs: dict[str, Any]
) -> None:
    """Raise ValueError for prompts that can't be decoded row by row."""
    if input_ids.shape[0] == 0:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: the batch is empty. Pass at least one "
            "prompt."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds isn't available together with assistant_model. Pass input_ids."
        )
    if input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: the prompts are empty. Start them with "
            "at least one token, such as the tokenizer's bos_token."
        )
    cache = model_kwargs.get("cache")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"cache (past_key_values) holds {cache.get_seq_length()} tokens; continuing from a "
            "cache isn't available together with assistant_model. Pass the whole text as input_ids "
            "without a cache."
        )
    if attention_mask is None:
        return
    mask = attention_mask != 0
    wrong = (mask[:, :-1] & ~mask[:, 1:]).any(dim=1) | ~mask[:, -1]
    if bool(wrong.any()):
        rows = wrong.nonzero()[:, 0].tolist()
        raise ValueError(
            f"attention_mask has zeros behind real tokens in rows {rows}: the prompts are padded "
            "on the right. Generation continues a row at its end, so set "
            "tokenizer.padding_side='left'."
        )


def check_processors(processors: LogitsProcessorList, num_rows: int) -> None:
    """Raise ValueError for processors that keep a state for the whole batch."""
    if num_rows > 1 and any(
        isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors
    ):
        raise ValueError(
            f"guidance_scale with a batch of {num_rows} doesn't combine with assistant_model: "
            "classifier-free guidance keeps one cache for rows that advance together. Generate one "
            "row at a time, or drop assistant_model."
        )


def row_seeds(value: Any, num_rows: int, device: torch.device) -> torch.Tensor:
    """The seeds of the sampling noise, int64 ``[B]``: given, or drawn from torch's generator.

    Raises:
        ValueError: not one integer for every row.
    """
    if value is None:
        return torch.randint(2**62, (num_rows,)).to(device)
    try:
        seeds = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        seeds = torch.empty(0)
    if seeds.shape != (num_rows,) or seeds.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"row_seeds={value!r} must hold {num_rows} integers, one for every row of the batch "
            "(num_return_sequences included)"
        )
    return seeds.to(device=device, dtype=torch.int64)
