"""Tiny Gemma 4 targets of every kind that is published, and assistants that fit them."""

import functools
from typing import Any

import torch
from tiny_models import EOS, PAD, VOCAB_SIZE
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

WINDOW = 8
ALTERNATING = ["sliding_attention", "full_attention"]
# With full layers of other sizes than the sliding ones, as published.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "layer_types": ALTERNATING * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.4,
    # Gemma scales its embeddings up; with a tied head a random model would only repeat its input.
    "tie_word_embeddings": False,
}
_GEMMA4: dict[str, Any] = {**BASE, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
_E2B: dict[str, Any] = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
}
_MOE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
# Per-layer embeddings and shared layers (E2B, E4B), a plain one (31B), experts and values that are
# keys (26B-A4B), and the unified model (12B), whose text model has classes of its own.
TEXT_CONFIGS: dict[str, Any] = {
    "E2B": lambda: Gemma4TextConfig(**{**_GEMMA4, **_E2B, "use_double_wide_mlp": True}),
    "per_layer_inputs": lambda: Gemma4TextConfig(
        **{**_GEMMA4, **_E2B, "num_kv_shared_layers": 0, "final_logit_softcapping": 20.0}
    ),
    "31B": lambda: Gemma4TextConfig(**_GEMMA4),
    "26B-A4B": lambda: Gemma4TextConfig(**_GEMMA4, **_MOE),
    "12B": lambda: Gemma4UnifiedTextConfig(
        **{**BASE, "global_head_dim": 16, "num_kv_shared_layers": 2}
    ),
    "3n": lambda: Gemma3nTextConfig(
        **BASE,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4,
    ),
}
TARGETS = sorted(TEXT_CONFIGS)
_CLASSES: dict[str, Any] = {
    "gemma4_text": Gemma4ForCausalLM,
    "gemma4_unified_text": Gemma4UnifiedForCausalLM,
    "gemma3n_text": Gemma3nForCausalLM,
}


@functools.cache
def gemma4_target(name: str) -> Any:
    """A tiny float32 target, the same one for every test."""
    config = TEXT_CONFIGS[name]()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = _CLASSES[config.model_type](config).eval()
    return without_eos(model)


def without_eos(model: Any) -> Any:
    """Most tests want texts of a known length."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def assistant_config(target_config: Any, centroids: bool = False, **fields: Any) -> Any:
    """Of a tiny assistant for a target; with ``centroids`` its head scores half of the ids."""
    config = target_config.get_text_config()
    unified = config.model_type == "gemma4_unified_text"
    sliding, full = (config.per_layer_config[config.layer_types.index(t)] for t in ALTERNATING)
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": sliding.num_key_value_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_key_value_heads,
        "attention_k_eq_v": True,
        "sliding_window": config.sliding_window,
        "max_position_embeddings": 512,
        "num_kv_shared_layers": 3,
        "pad_token_id": PAD,
        "initializer_range": 0.4,
        **fields,
    }
    outer: dict[str, Any] = {
        "backbone_hidden_size": config.hidden_size,
        "use_ordered_embeddings": centroids,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 4,
    }
    if unified:
        return Gemma4UnifiedAssistantConfig(text_config=Gemma4UnifiedTextConfig(**sizes), **outer)
    none: dict[str, Any] = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    return Gemma4AssistantConfig(text_config=Gemma4TextConfig(**sizes, **none), **outer)


def gemma4_assistant(target: Any, centroids: bool = False, seed: int = 3, **fields: Any) -> Any:
    """A tiny assistant with random weights for a target, as transformers would load it."""
    config = assistant_config(target.config, centroids, **fields)
    unified = config.model_type == "gemma4_unified_assistant"
    cls: Any = Gemma4UnifiedAssistantForCausalLM if unified else Gemma4AssistantForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config).eval()
        if centroids:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    return model
