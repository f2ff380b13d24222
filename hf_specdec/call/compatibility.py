"""What is refused before any forward, and why: each message names the argument and a way out."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specdec.drafters import Drafter
from hf_specdec.options import tree_words
from hf_specdec.outputs import OutputRequest
from hf_specdec.static_shapes import CompileChoice
from hf_specdec.streaming import RowStreamer
from hf_specdec.targets import lockstep
from hf_specdec.targets.adapters import check_adapters
from hf_specdec.targets.layer_types import attention_layers
from hf_specdec.targets.masked_attention import check_attention
from hf_specdec.targets.training_mode import check_mode

# Static caches only make shapes constant: see `compile_options`.
_EMULATED_CACHES = (None, "dynamic", "static")
# What a prompt may bring along and still be run in chunks.
_CHUNKABLE = {
    "attention_mask",
    "cache",
    "inputs_embeds",
    "logits_to_keep",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
    "position_ids",
    "token_type_ids",
    "use_cache",
}


def check_target(target: PreTrainedModel) -> None:
    """Raise ValueError if the target can't verify several tokens at once and roll back."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"The target {name} is an encoder-decoder model; this assistant_model drafts for "
            "decoder-only models. Call generate() without it."
        )
    if not is_lockstep(target):
        if getattr(target, "_is_stateful", False):
            raise ValueError(
                f"The target {name} keeps a recurrent state, and rolling it back after a rejected "
                f"draft is only known to be right for {', '.join(sorted(lockstep.MODEL_TYPES))}. "
                "Call generate() without assistant_model."
            )
        attention_layers(target)
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise ValueError(
            f"The target {name} takes no position_ids, so rows of different lengths can't be "
            "verified together. Call generate() without assistant_model."
        )
    check_attention(target)
    check_adapters(target)
    check_mode(target)
    if target.get_output_embeddings() is None:
        raise ValueError(f"The target {name} has no output embeddings (lm_head) to read.")


def is_lockstep(target: PreTrainedModel) -> bool:
    """Whether the rows of this target have to advance together (see `lockstep`)."""
    model_type = target.config.get_text_config(decoder=True).model_type
    return model_type in lockstep.MODEL_TYPES


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
            f"this assistant_model can draft (0 decodes without drafts), or 'auto'"
        )
    layers = drafter.default_draft_tokens
    if drafter.method == "mtp" and value > layers and value % layers:
        raise ValueError(
            f"{source}={value} must be a multiple of {layers}, the number of MTP layers of the "
            "target, as they are used again in turn"
        )
    return value


def check_tree(wish: tree_words.TreeWish, drafter: Drafter, target: PreTrainedModel) -> None:
    """Raise ValueError unless the drafter can draft the trees asked for, and the target run them.

    Args:
        wish: anything but a chain.
        drafter: of the call.
        target: of the call.
    """
    if not drafter.drafts_trees:
        raise ValueError(
            f"{wish}: {type(drafter).__name__} drafts chains only; trees come from MLP "
            "speculators. Leave it out"
        )
    if is_lockstep(target):
        raise ValueError(
            f"{wish}: the target {type(target).__name__} has recurrent layers, which run "
            "tokens one behind the other and can't branch. Leave it out"
        )
    depth = max((len(path) for path in wish.paths), default=0)
    if depth > drafter.max_draft_tokens:
        raise ValueError(
            f"{wish} is {depth} tokens deep, but this assistant_model can draft "
            f"{drafter.max_draft_tokens}. Leave deeper nodes out"
        )
    width = max((path[-1] + 1 for path in wish.paths), default=0)
    if width > drafter.max_children:
        raise ValueError(
            f"{wish} has a node with {width} children, but this assistant_model knows "
            f"{drafter.max_children} tokens"
        )


def check_generation_config(config: GenerationConfig) -> None:
    """Raise ValueError for settings under which this loop would not do what they say."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams} doesn't combine with assistant_model: drafts are "
            "verified for greedy decoding and sampling. Set num_beams=1 or drop assistant_model."
        )
    if not config.use_cache:
        raise ValueError("use_cache=False: drafts are verified with a cache. Set use_cache=True.")
    if config.cache_implementation not in _EMULATED_CACHES:
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} isn't available together with "
            "assistant_model, which brings a cache of its own: full keys and values, on the "
            f"target's device. Leave it unset (or one of {list(_EMULATED_CACHES[1:])}, which give "
            "the same tokens)."
        )


def output_request(config: GenerationConfig, target: PreTrainedModel) -> OutputRequest:
    """What to collect besides the tokens; nothing unless a dict is returned, as in transformers.

    Raises:
        ValueError: attentions of a target whose layers aren't all attention, or whose attention
            implementation computes none.
    """
    if not config.return_dict_in_generate:
        return OutputRequest()
    if config.output_attentions:
        implementation = target.config.get_text_config()._attn_implementation
        if implementation != "eager":
            raise ValueError(
                "output_attentions=True needs a target that computes attention weights, but "
                f"{type(target).__name__} uses attn_implementation={implementation!r}. Load it "
                "with attn_implementation='eager'."
            )
        if is_lockstep(target):
            raise ValueError(
                f"output_attentions=True isn't available together with assistant_model for "
                f"{type(target).__name__}, which has layers without attention. Drop it, or call "
                "generate() without assistant_model."
            )
    return OutputRequest(
        scores=bool(config.output_scores),
        logits=bool(config.output_logits),
        hidden_states=bool(config.output_hidden_states),
        attentions=bool(config.output_attentions),
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
    embeds = model_kwargs.get("inputs_embeds")
    if input_ids.shape[1] == 0 and (embeds is None or embeds.shape[1] == 0):
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: the prompts are empty. Start them with "
            "at least one token, such as the tokenizer's bos_token."
        )
    if attention_mask is None:
        return
    wrong = attention_mask[:, -1] == 0
    if bool(wrong.any()):
        rows = wrong.nonzero()[:, 0].tolist()
        raise ValueError(
            f"attention_mask has zeros behind real tokens in rows {rows}: the prompts are padded "
            "on the right. Generation continues a row at its end, so set "
            "tokenizer.padding_side='left'."
        )


def check_chunks(chunk_size: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the prompt can't be run in chunks of ``prefill_chunk_size``."""
    if chunk_size is None:
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"prefill_chunk_size={chunk_size!r} must be an integer of at least 1")
    others = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in _CHUNKABLE and isinstance(value, torch.Tensor)
    )
    if others:
        raise ValueError(
            f"prefill_chunk_size={chunk_size} can't split {others} into chunks. Leave it unset."
        )


def check_cache(
    cache: Any, num_rows: int, num_ids: int, num_slots: int, target: PreTrainedModel
) -> None:
    """Raise ValueError unless a given cache can be continued and handed back.

    Args:
        cache: the caller's cache.
        num_rows: rows of the batch.
        num_ids: tokens of ``input_ids``.
        num_slots: tokens of the prompt, those in the cache included, as far as the arguments tell.
        target: whose cache it is.
    """
    name = type(cache).__name__
    if type(cache) is not DynamicCache or cache.offloading:
        kind = f"offloaded {name}" if getattr(cache, "offloading", False) else name
        raise ValueError(
            f"cache (past_key_values) is a {kind}, which this assistant_model's loop can't "
            "continue. Pass a DynamicCache(config=model.config), or none."
        )
    if is_lockstep(target) and num_rows > 1:
        raise ValueError(
            f"cache (past_key_values) with a batch of {num_rows}: {type(target).__name__} keeps a "
            "recurrent state, and rows that finish earlier could not be handed back. Generate one "
            "row at a time, or pass no cache."
        )
    held = cache.get_seq_length()
    if held == 0:
        return
    if held >= num_slots:
        raise ValueError(
            f"cache (past_key_values) holds {held} tokens, but the prompt has {num_slots} "
            f"(input_ids has {num_ids}): there is nothing left to run. Pass the whole text as "
            "input_ids, or only its new tokens together with an attention_mask for all of it."
        )
    filled = (getattr(layer, "keys", None) for layer in cache.layers)
    rows = next((keys.shape[0] for keys in filled if keys is not None), num_rows)
    if rows != num_rows:
        raise ValueError(
            f"cache (past_key_values) holds {rows} rows, but the batch has {num_rows} "
            "(num_return_sequences included)"
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


def check_ranks(
    in_step: bool, target: PreTrainedModel, compiles: CompileChoice | None, drafter: Drafter
) -> None:
    """Raise ValueError if ranks that must run the same number of forwards couldn't.

    Args:
        in_step: whether they must (``synced_gpus``).
        target: of the call.
        compiles: how the call's forwards are compiled, if they are.
        drafter: of the call.
    """
    if not in_step:
        return
    if is_lockstep(target):
        raise ValueError(
            f"synced_gpus=True: the target {type(target).__name__} has recurrent layers and runs "
            "tokens again after a rejected draft, when others don't. Call generate() without "
            "assistant_model"
        )
    weight: Any = target.get_output_embeddings().weight
    if weight.ndim != 2 or weight.untyped_storage().nbytes() == 0:
        raise ValueError(
            f"synced_gpus=True: the output head of {type(target).__name__} is in pieces between "
            "forwards. Under FullyShardedDataParallel call generate() inside "
            "FullyShardedDataParallel.summon_full_params(model, writeback=False, recurse=False)"
        )
    if compiles is not None:
        raise ValueError(
            "synced_gpus=True: ranks that compile their forwards don't run equally many. Set "
            "disable_compile=True, or leave cache_implementation='static' out"
        )
    # The target may be among them; FSDP puts it together for its own forwards.
    parts = [v for v in vars(drafter.source).values() if isinstance(v, nn.Module)]
    for part in parts:
        if part is not target and _is_cut(part):
            raise ValueError(
                f"synced_gpus=True: assistant_model, a {type(part).__name__}, is cut between the "
                "ranks, and would be put together for every draft token. It is small: load it "
                "whole on each of them, and leave it out of fully_shard, FullyShardedDataParallel "
                "or DeepSpeed's ZeRO-3"
            )


def _is_cut(model: nn.Module) -> bool:
    """Whether ranks hold pieces of a model's weights between forwards."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in model.modules()):
        return True
    # What ZeRO-3 leaves of them.
    return any(weight.untyped_storage().nbytes() == 0 for weight in model.parameters())


def check_streamer(streamer: Any, num_rows: int) -> None:
    """Raise ValueError for a streamer that takes one row, and a batch of several."""
    if streamer is not None and num_rows > 1 and not isinstance(streamer, RowStreamer):
        raise ValueError(
            f"streamer takes one row, but the batch has {num_rows} rows. Generate one row at a "
            "time, or pass a hf_specdec.RowStreamer"
        )


def row_seeds(value: Any, num_rows: int, device: torch.device, do_sample: bool) -> torch.Tensor:
    """The seeds of the sampling noise, int64 ``[B]``: given, or drawn from torch's generator.

    Greedy calls draw none: like plain ones they leave the generator where it is.

    Raises:
        ValueError: not one integer for every row.
    """
    if value is None and not do_sample:
        return torch.zeros(num_rows, dtype=torch.long, device=device)
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
