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
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
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


IMAGE, AUDIO, VIDEO = 60, 61, 62
IMAGE_TOKENS, AUDIO_TOKENS = 4, 5
_UNIFIED_VISION = {"patch_size": 2, "pooling_kernel_size": 3, "mm_posemb_size": 64}


@functools.cache
def gemma4_multimodal(name: str) -> Any:
    """A target that sees and hears; ``name`` chooses its text model."""
    text = TEXT_CONFIGS[name]()
    ids: dict[str, Any] = {
        "image_token_id": IMAGE, "audio_token_id": AUDIO, "video_token_id": VIDEO,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if name == "12B":
        unified = Gemma4UnifiedConfig(
            text_config=text,
            vision_config={**_UNIFIED_VISION, "mm_embed_dim": 32, "output_proj_dims": 32},
            audio_config={"audio_embed_dim": 24},
            **ids,
        )
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return without_eos(Gemma4UnifiedForConditionalGeneration(unified).eval())
    # As 26B-A4B and 31B: tokens of an image see each other in the sliding layers.
    text.use_bidirectional_attention = None if name == "E2B" else "vision"
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "patch_size": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "position_embedding_size": 64, "pooling_kernel_size": 3,
    }  # fmt: skip
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=audio, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: Any = without_eos(Gemma4ForConditionalGeneration(config).eval())
    model.model.audio_tower.config._attn_implementation = "eager"
    return model


def multimodal_prompts(name: str) -> dict[str, torch.Tensor]:
    """Two rows: text, an image of 4 tokens, text, a sound of 5, text; the second is padded."""
    generator = torch.Generator().manual_seed(9)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(2, *shape, generator=generator)

    before, after = torch.randint(3, 58, (2, 2, 7), generator=generator)
    image, sound = torch.full((2, IMAGE_TOKENS), IMAGE), torch.full((2, AUDIO_TOKENS), AUDIO)
    ids = torch.cat([before, image, after, sound, before[:, :3]], dim=1)
    ids[1, :5] = PAD
    # The unified model has no encoders: a patch is a token, and so is a frame of sound.
    unified = name == "12B"
    side, pixels, frames, width = (2, 108, AUDIO_TOKENS, 24) if unified else (6, 12, 20, 128)
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy")
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "mm_token_type_ids": (ids == IMAGE).long() + 3 * (ids == AUDIO).long(),
        "pixel_values": random(side * side, pixels),
        "image_position_ids": torch.stack([x.flatten(), y.flatten()], dim=-1).repeat(2, 1, 1),
        "input_features": random(frames, width) - 0.5,
        "input_features_mask": torch.ones(2, frames, dtype=torch.bool),
    }
