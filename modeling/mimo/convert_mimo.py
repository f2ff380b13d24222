"""A Llama expressed as a MiMo, with MTP layers that are still to be trained.

A Llama is a Qwen2 whose attention biases are zero, so the target stays exactly what it was; what is
new are the MTP layers. They begin where they have least to learn: the decoder layer as a copy of
the target's last one, the final norm as the target's, and ``input_proj`` as the mean of state and
embedding.

Boundary: weights in, weights out. How the layers are trained is `hf_specdec.training`'s business.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .configuration_mimo import MiMoConfig
from .modeling_mimo import MiMoForCausalLM

# Fields of a LlamaConfig that mean the same in a MiMoConfig.
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
    "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings", "rope_parameters",
    "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
# Fields that add parameters a MiMo has no place for.
_MUST_BE_FALSE = ("attention_bias", "mlp_bias")


def mimo_from_llama(
    target: LlamaForCausalLM,
    num_mtp_layers: int = 1,
    mtp_feed: str = "post_norm",
    mtp_mask_position_0: bool = True,
) -> MiMoForCausalLM:
    """Express ``target`` as a MiMo with fresh MTP layers; its logits stay what they were.

    Args:
        target: a Llama without biases. The result shares its tensors: changing one changes both.
        num_mtp_layers: layers to add; the first one makes every draft (see `MiMoMTP`).
        mtp_feed: see [`MiMoConfig`]; ``"post_norm"`` is the state that a training corpus holds.
        mtp_mask_position_0: see [`MiMoConfig`].

    Raises:
        TypeError: another model.
        ValueError: a Llama that can't be expressed; the message names the field.
    """
    if not isinstance(target, LlamaForCausalLM):
        raise TypeError(
            f"target must be a LlamaForCausalLM, got {type(target).__name__}; only a Llama without "
            "biases is known to be a Qwen2, and so a MiMo, exactly"
        )
    config = _config(target.config, num_mtp_layers, mtp_feed, mtp_mask_position_0)
    state = dict(target.state_dict())
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"target: {name} is {tensor.dtype}, a quantized weight; load the target "
                "dequantized, in bfloat16 or float32"
            )
    last = f"model.layers.{config.num_hidden_layers - 1}."
    layer = {k.removeprefix(last): v for k, v in state.items() if k.startswith(last)}
    for index in range(num_mtp_layers):
        fresh = _mtp_layer(layer, state["model.norm.weight"], mtp_feed)
        state |= {f"model.mtp_layers.{index}.{name}": value for name, value in fresh.items()}
    for name in [name for name in state if name.endswith("_proj.weight")]:
        # Qwen2 adds a bias to these three.
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            weight = state[name]
            state[name.replace(".weight", ".bias")] = weight.new_zeros(len(weight))
    # Without memory of its own: every tensor is assigned.
    with torch.device("meta"):
        model = MiMoForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    rotary: Any = model.model.rotary_emb
    for name, buffer in target.model.rotary_emb.named_buffers():
        # As they are: computed anew they could differ, where the target was cast as a whole.
        rotary.register_buffer(name, buffer, persistent=False)
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.train(target.training)


def _config(source: LlamaConfig, num_mtp_layers: int, feed: str, mask: bool) -> MiMoConfig:
    for name in _MUST_BE_FALSE:
        if getattr(source, name, False):
            raise ValueError(
                f"target.config.{name}=True adds biases that a MiMo has no place for; only a Llama "
                f"with {name}=False can be expressed as one"
            )
    config = MiMoConfig(
        **{name: getattr(source, name) for name in _SAME},
        num_nextn_predict_layers=num_mtp_layers,
        mtp_feed=feed,
        mtp_mask_position_0=mask,
    )
    config._name_or_path = source._name_or_path
    config.dtype = source.dtype
    return config


def _mtp_layer(decoder_layer: dict[str, Tensor], norm: Tensor, feed: str) -> dict[str, Tensor]:
    """Initial weights of one MTP layer, without biases.

    Args:
        decoder_layer: of the target's last layer.
        norm: weight of the target's final norm [d].
        feed: of the config.
    """
    ones = torch.ones_like(norm)
    half = torch.eye(len(norm), dtype=norm.dtype, device=norm.device) * 4
    # The final norm's scale is taken off again, as the decoder layer expects a state without it.
    scale = ones if feed == "pre_norm" else 1 / norm.abs().clamp(min=norm.abs().mean() / 10)
    return {
        **{name: tensor.clone() for name, tensor in decoder_layer.items()},
        "token_layernorm.weight": ones,
        "hidden_layernorm.weight": scale / scale.square().mean().sqrt(),
        "input_proj.weight": torch.cat([half, half], dim=1),
        "final_layernorm.weight": norm.clone(),
    }
