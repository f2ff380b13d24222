"""Tiny checkpoints of every MTP family, written in the layout in which it is published.

The target's part is what transformers writes for it. The MTP part is written here, key by key: its
decoder layers have the names and shapes of a target layer of the same kind in the file, the rest is
spelled out. Nothing here uses the project's table of names.
"""

import functools
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import EOS, PAD, VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HIDDEN, LAYERS = 32, 3
Shapes = dict[str, torch.Size]

_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Few enough that attention leaves most of a text out. Scores of exactly zero would be a tie, and
# which of equals is chosen depends on how many keys there are: so many heads, and no id whose
# embedding is zero.
_INDEXER = {"index_topk": 5, "index_n_heads": 24, "index_head_dim": 8, "pad_token_id": None}
_QWEN_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """How a family's checkpoint looks.

    Attributes:
        model_type: of the config.
        fields: of the text config, beyond the common ones.
        block: regular expression of the keys of a target layer like those of the MTP module.
        layout: from the number of modules to {key: shape}; ``{block}`` in a key stands for every
            name of the block.
        outer: fields around the text config, for models with one.
        modules: MTP modules.
    """

    model_type: str
    fields: dict[str, Any]
    block: str
    layout: Callable[[int], dict[str, tuple[int, ...] | None]]
    outer: dict[str, Any] | None = None
    modules: int = 1
    declared: dict[str, Any] = field(default_factory=dict)


def _norms(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,) for name in names}


def _deepseek(prefix: str = "model.layers.", norm: str = "shared_head.norm", own: bool = True):
    def layout(n: int) -> dict[str, tuple[int, ...] | None]:
        keys: dict[str, tuple[int, ...] | None] = {}
        for i in range(LAYERS, LAYERS + n):
            p = f"{prefix}{i}."
            keys |= _norms(f"{p}enorm", f"{p}hnorm", f"{p}{norm}")
            keys[f"{p}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
            keys[f"{p}{{block}}"] = None
            if own:
                keys[f"{p}embed_tokens.weight"] = (VOCAB_SIZE, HIDDEN)
                keys[f"{p}shared_head.head.weight"] = (VOCAB_SIZE, HIDDEN)
        return keys

    return layout


def _qwen(n: int) -> dict[str, tuple[int, ...] | None]:
    keys: dict[str, tuple[int, ...] | None] = {
        **_norms("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    }
    return keys | {f"mtp.layers.{i}.{{block}}": None for i in range(n)}


def _mimo_v2(n: int) -> dict[str, tuple[int, ...] | None]:
    keys: dict[str, tuple[int, ...] | None] = {}
    for i in range(n):
        p = f"model.mtp.layers.{i}."
        keys |= _norms(f"{p}enorm", f"{p}hnorm", f"{p}final_layernorm", f"{p}input_layernorm")
        keys |= _norms(f"{p}pre_mlp_layernorm")
        keys[f"{p}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        keys[f"{p}self_attn.q_proj.weight"] = (4 * 12, HIDDEN)
        keys[f"{p}self_attn.k_proj.weight"] = (2 * 12, HIDDEN)
        keys[f"{p}self_attn.v_proj.weight"] = (2 * 8, HIDDEN)
        keys[f"{p}self_attn.o_proj.weight"] = (HIDDEN, 4 * 8)
        keys[f"{p}self_attn.attention_sink_bias"] = (4,)
        keys[f"{p}mlp.gate_proj.weight"] = keys[f"{p}mlp.up_proj.weight"] = (48, HIDDEN)
        keys[f"{p}mlp.down_proj.weight"] = (HIDDEN, 48)
    return keys


def _nemotron(n: int) -> dict[str, tuple[int, ...] | None]:
    keys: dict[str, tuple[int, ...] | None] = {
        **_norms("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"),
        **_norms("mtp.layers.0.norm", "mtp.layers.1.norm"),
        "mtp.layers.0.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.layers.0.mixer.q_proj.weight": (32, HIDDEN),
        "mtp.layers.0.mixer.k_proj.weight": (16, HIDDEN),
        "mtp.layers.0.mixer.v_proj.weight": (16, HIDDEN),
        "mtp.layers.0.mixer.o_proj.weight": (HIDDEN, 32),
    }
    # The expert layer is like the target's.
    return keys | {"mtp.layers.1.{block}": None}


def _ernie(n: int) -> dict[str, tuple[int, ...] | None]:
    keys: dict[str, tuple[int, ...] | None] = {}
    for i in range(n):
        keys |= _norms(f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}")
        keys[f"model.mtp_linear_proj.{i}.weight"] = (HIDDEN, 2 * HIDDEN)
        keys[f"model.mtp_block.{i}.{{block}}"] = None
    return keys


def _longcat(n: int) -> dict[str, tuple[int, ...] | None]:
    p = "model.mtp.layers.0."
    attention = f"{p}self_attn."
    return {
        **_norms(f"{p}enorm.m", f"{p}hnorm.m", f"{p}input_layernorm"),
        **_norms(f"{p}post_attention_layernorm", "model.mtp.norm"),
        "model.mtp.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        f"{p}eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{attention}q_a_proj.weight": (16, HIDDEN),
        f"{attention}q_a_layernorm.weight": (16,),
        f"{attention}q_b_proj.weight": (4 * 12, 16),
        f"{attention}kv_a_proj_with_mqa.weight": (8 + 4, HIDDEN),
        f"{attention}kv_a_layernorm.weight": (8,),
        f"{attention}kv_b_proj.weight": (4 * 16, 8),
        f"{attention}o_proj.weight": (HIDDEN, 4 * 8),
        f"{p}transformer_layer.mlp.gate_proj.weight": (48, HIDDEN),
        f"{p}transformer_layer.mlp.up_proj.weight": (48, HIDDEN),
        f"{p}transformer_layer.mlp.down_proj.weight": (HIDDEN, 48),
    }


def _step(n: int) -> dict[str, tuple[int, ...] | None]:
    keys: dict[str, tuple[int, ...] | None] = {}
    for i in range(LAYERS, LAYERS + n):
        p = f"model.layers.{i}."
        keys |= _norms(f"{p}enorm", f"{p}hnorm", f"{p}shared_head.norm")
        keys[f"{p}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        keys[f"{p}shared_head.output.weight"] = (VOCAB_SIZE, HIDDEN)
        keys[f"{p}{{block}}"] = None
    return keys


_LAYER = r"(?:model\.)?(?:language_model\.)?layers\."
FAMILIES: dict[str, Published] = {
    "deepseek_v3": Published(
        "deepseek_v3", {**_MLA, **_MOE, "first_k_dense_replace": 1}, _LAYER + r"2\.", _deepseek()
    ),
    "deepseek_v3-two_modules": Published(
        "deepseek_v3", {**_MLA, **_MOE, "first_k_dense_replace": 1}, _LAYER + r"2\.", _deepseek(),
        modules=2,
    ),
    "deepseek_v32": Published(
        "deepseek_v32", {**_MLA, **_MOE, **_INDEXER, "first_k_dense_replace": 1}, _LAYER + r"2\.",
        _deepseek(),
    ),
    "glm_moe_dsa": Published(
        "glm_moe_dsa",
        {**_MLA, **_MOE, **_INDEXER, "first_k_dense_replace": 1,
         "indexer_types": ["full", "shared", "full"]},
        _LAYER + r"2\.", _deepseek(),
    ),
    "glm4_moe": Published(
        "glm4_moe", {**_MOE, "first_k_dense_replace": 1, "head_dim": 8}, _LAYER + r"2\.",
        _deepseek(),
    ),
    "glm4_moe_lite": Published(
        "glm4_moe_lite", {**_MLA, **_MOE}, _LAYER + r"2\.", _deepseek()
    ),
    "glm_ocr": Published(
        "glm_ocr",
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
         "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}},
        r"model\.language_model\.layers\.2\.", _deepseek("model.language_model.layers."),
        outer={"vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2,
               "intermediate_size": 16, "out_hidden_size": 32, "patch_size": 2}},
    ),
    "qwen3_next": Published("qwen3_next", {**_LINEAR, **_QWEN_MOE}, _LAYER + r"2\.", _qwen),
    "qwen3_5": Published(
        "qwen3_5_text",
        {**_LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
         "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
        _LAYER + r"2\.", _qwen, declared={"mtp_num_hidden_layers": 1},
    ),
    "qwen3_5_moe": Published(
        "qwen3_5_moe_text",
        {**_LINEAR, **_QWEN_MOE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
         "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
        _LAYER + r"2\.", _qwen, declared={"mtp_num_hidden_layers": 1},
    ),
    "mimo_v2_flash": Published(
        "mimo_v2_flash",
        {**_MOE, "head_dim": 12, "v_head_dim": 8, "num_key_value_heads": 1, "sliding_window": 9,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        _LAYER + r"9\.", _mimo_v2, modules=3, declared={},
    ),
    "nemotron_h": Published(
        "nemotron_h",
        {"layer_types": ["linear_attention", "full_attention", "moe"], "mamba_num_heads": 4,
         "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 3,
         "chunk_size": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "time_step_min": 1e-30, "time_step_floor": 1e-30,
         "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
         "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "mtp_layers_block_type": ["full_attention", "moe"]},
        r"(?:model|backbone)\.layers\.2\.(?=mixer)", _nemotron,
    ),
    "ernie4_5_moe": Published(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
         "moe_intermediate_size": 16, "moe_layer_start_index": 1},
        _LAYER + r"0\.", _ernie,
    ),
    "exaone_moe": Published(
        "exaone_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
         "sliding_window": 9, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        _LAYER + r"0\.", _qwen,
    ),
    "exaone4_5": Published(
        "exaone4_5",
        {"model_type": "exaone4", "head_dim": 8, "sliding_window": 9,
         "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        r"model\.language_model\.layers\.0\.", _qwen,
        outer={"vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2,
               "num_key_value_heads": 1, "intermediate_size": 16, "out_hidden_size": 32,
               "patch_size": 2, "window_size": 8, "fullatt_block_indexes": [0]}},
    ),
    "longcat_flash": Published(
        "longcat_flash",
        {**_MLA, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
         "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1, "head_dim": 4},
        _LAYER + r"9\.", _longcat,
    ),
    "hy_v3": Published(
        "hy_v3",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        _LAYER + r"2\.", _deepseek(norm="final_layernorm", own=False),
    ),
    "step3p7": Published(
        "step3p7",
        {"head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "share_expert_dim": 16, "sliding_window": 9,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]
         + ["sliding_attention"] * 3,
         "mlp_layer_types": ["dense", "sparse", "sparse"] + ["dense"] * 3},
        r"model\.(?:language_model\.)?layers\.0\.", _step, modules=3,
        outer={"vision_config": {"num_hidden_layers": 1, "hidden_size": 16,
               "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 2,
               "image_size": 8}},
    ),
    "bailing_hybrid": Published(
        "bailing_hybrid",
        {**_MLA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8,
         "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        _LAYER + r"2\.", _deepseek(norm="final_layernorm", own=False),
    ),
}  # fmt: skip


def config_of(published: Published) -> Any:
    """The tiny config."""
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 48,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS,
        "pad_token_id": PAD, "initializer_range": 0.4, "tie_word_embeddings": False,
    }  # fmt: skip
    declared = published.declared
    if published.model_type != "mimo_v2_flash" and not declared:
        declared = {"num_nextn_predict_layers": published.modules}
    text |= published.fields | declared
    if published.outer is None:
        return AutoConfig.for_model(published.model_type, **text)
    return AutoConfig.for_model(
        published.model_type, text_config=text, **published.outer, pad_token_id=PAD
    )


@functools.cache
def write(name: str) -> Path:
    """Write a family's checkpoint, in two shards with an index, and return its folder."""
    published = FAMILIES[name]
    folder = Path(tempfile.mkdtemp(prefix=f"mtp-{name}-"))
    config = config_of(published)
    auto = AutoModelForCausalLM if published.outer is None else AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = auto.from_config(config).eval()
        model.save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        block = {
            re.sub(published.block, "", key, count=1): tensor.shape
            for key, tensor in state.items()
            if re.match(published.block, key)
        }
        mtp: dict[str, torch.Tensor] = {}
        for key, shape in published.layout(published.modules).items():
            if shape is not None:
                mtp[key] = _random(key, shape)
                continue
            assert block, f"no key of {name} matches {published.block}"
            for inner, inner_shape in block.items():
                mtp[key.format(block=inner)] = _random(inner, inner_shape)
    assert not set(mtp) & set(state)
    (folder / "model.safetensors").unlink()
    save_file(state, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file(mtp, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(state, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(mtp, "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _random(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1 and "norm" in key:
        return 1 + 0.3 * torch.randn(shape)
    return 0.2 * torch.randn(shape)


def load(name: str, **kwargs: Any) -> Any:
    """The target, as a user loads it."""
    published = FAMILIES[name]
    auto = AutoModelForCausalLM if published.outer is None else AutoModelForImageTextToText
    model = auto.from_pretrained(write(name), dtype=torch.float32, **kwargs).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model
