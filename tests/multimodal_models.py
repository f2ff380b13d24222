"""Tiny targets that see images, and prompts with images for them."""

import functools
import math
from typing import Any

import torch
from gemma4_models import without_eos
from tiny_models import EOS, PAD, VOCAB_SIZE
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

IMAGE, START, END, VIDEO = 60, 58, 59, 61
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
# Read by these configs, but not in their signatures.
_PADDING: dict[str, Any] = {"pad_token_id": PAD}
_EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    # Images must matter, or nobody notices where they stand.
    "initializer_range": 0.4,
}
_QWEN_EYES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.4,
}
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def _rope(**fields: Any) -> dict[str, Any]:
    """Rotary embeddings over time, height and width."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], **fields}


_MAKE: dict[str, Any] = {
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=LlamaConfig(**_TEXT),
            vision_config=CLIPVisionConfig(**{**_EYES, "image_size": 8}),
            image_token_index=IMAGE,
            vision_feature_select_strategy="default",
            vision_feature_layer=-1,
        )
    ),
    "qwen2_vl": lambda: Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={**_TEXT, "rope_parameters": _rope()},
            vision_config={**_QWEN_EYES, "embed_dim": 32, "mlp_ratio": 2, "in_channels": 3},
            **_QWEN_IDS,
        )
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _rope()},
            vision_config={
                **_QWEN_EYES,
                "out_hidden_size": 32,
                "intermediate_size": 48,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_QWEN_IDS,
        )
    ),
    "qwen3_vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={
                **_TEXT,
                "head_dim": 8,
                "rope_parameters": _rope(mrope_interleaved=True),
            },
            vision_config={
                **_QWEN_EYES,
                "out_hidden_size": 32,
                "intermediate_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **_QWEN_IDS,
        )
    ),
    # Its rows advance together.
    "qwen3_5": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config={
                **_TEXT,
                "head_dim": 16,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "rope_parameters": _rope(mrope_interleaved=True, partial_rotary_factor=0.5),
            },
            vision_config={
                **_QWEN_EYES,
                "out_hidden_size": 32,
                "intermediate_size": 48,
                "num_position_embeddings": 16,
            },
            **_QWEN_IDS,
        )
    ),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                **_TEXT,
                "head_dim": 8,
                "sliding_window": 8,
                "query_pre_attn_scalar": 8,
                "tie_word_embeddings": False,
            },
            vision_config={**_EYES, "image_size": 8},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
            tie_word_embeddings=False,
        )
    ),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=MistralConfig(**_TEXT, head_dim=8),
            vision_config=PixtralVisionConfig(**_EYES),
            image_token_index=IMAGE,
            spatial_merge_size=2,
        )
    ),
    "idefics3": lambda: Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=LlamaConfig(**_TEXT),
            vision_config=_EYES,
            image_token_id=IMAGE,
            scale_factor=2,
            **_PADDING,
        )
    ),
    "smolvlm": lambda: SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            text_config=LlamaConfig(**_TEXT),
            vision_config=_EYES,
            image_token_id=IMAGE,
            scale_factor=2,
            **_PADDING,
        )
    ),
    "internvl": lambda: InternVLForConditionalGeneration(
        InternVLConfig(
            text_config=Qwen2Config(**_TEXT),
            vision_config={**_EYES, "image_size": [16, 16], "patch_size": [4, 4]},
            image_token_id=IMAGE,
            downsample_ratio=0.5,
            image_seq_length=4,
        )
    ),
}
SEEING = sorted(_MAKE)
ALONG_AXES = ["qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl"]
"""Those whose positions have axes for time, height and width."""


@functools.cache
def seeing_target(name: str) -> Any:
    """A tiny float32 target, the same one for every test."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = without_eos(_MAKE[name]().eval())
        if name == "gemma3":
            # Made of zeros, for a checkpoint to fill; no image would be seen.
            model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
        return model


# 4 by 6 patches are merged to 2 by 3 tokens: three positions for six tokens.
_GRIDS = [[1, 4, 6], [1, 4, 4], [1, 4, 8]]


def _images(name: str, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    if name in ALONG_AXES:
        # Of every other size, so that rows are ahead of their tokens by different numbers.
        grids = torch.tensor(_GRIDS[:count])
        pixels = torch.randn(int(grids.prod(dim=1).sum()), 96, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grids}
    size = 8 if name in ("llava", "gemma3") else 16
    shape = (count, 1, 3) if name in ("idefics3", "smolvlm") else (count, 3)
    images = {"pixel_values": torch.randn(*shape, size, size, generator=generator)}
    if name == "mistral3":
        images["image_sizes"] = torch.tensor([[size, size]] * count)
    return images


def seen_prompts(name: str, rows: int = 3) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths, each with an image at another place."""
    generator = torch.Generator().manual_seed(5)
    texts = []
    for row, (before, behind) in enumerate([(3, 7), (2, 4), (6, 2)][:rows]):
        per_image = math.prod(_GRIDS[row]) // 4 if name in ALONG_AXES else 4
        front, back = (
            torch.randint(3, 50, (n,), generator=generator).tolist() for n in (before, behind)
        )
        texts.append([*front, START, *[IMAGE] * per_image, END, *back])
    width = max(map(len, texts))
    ids = torch.tensor([[PAD] * (width - len(text)) + text for text in texts])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long(), **_images(name, rows)}
    if name in ALONG_AXES or name == "gemma3":
        kinds = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
        inputs[kinds] = (ids == IMAGE).long()
    return inputs


def seen_row(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row of `seen_prompts` without its padding."""
    mask = inputs["attention_mask"][row].bool()
    alone = {}
    for name, value in inputs.items():
        part = value[row : row + 1]
        if name == "pixel_values" and "image_grid_thw" in inputs:
            sizes = inputs["image_grid_thw"].prod(dim=1).tolist()
            part = value.split(sizes)[row]
        alone[name] = part[:, mask] if part.shape[1:] == mask.shape else part
    return alone
