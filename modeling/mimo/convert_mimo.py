"""A Llama, Qwen2 or Mistral expressed as a MiMo, with MTP layers that are still to be trained.

A MiMo is a Qwen2, and a Llama is a Qwen2 whose attention biases are zero, as is a Mistral whose
layers attend to everything. So the target stays exactly what it was; what is new are the MTP
layers. They begin where they have least to learn: the decoder layer as a copy of
the target's last one, the final norm as the target's, and ``input_proj`` as the mean of state and
embedding.

Boundary: weights in, weights out. How the layers are trained is `hf_specdec.training`'s business.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from hf_specdec.modeling.quantized import is_plain

from .configuration_mimo import MiMoConfig
from .modeling_mimo import MiMoForCausalLM

# Fields that mean the same in a MiMoConfig; some families lack some of them.
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
    "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings", "rope_parameters",
    "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
# Fields that add parameters a MiMo has no place for.
_MUST_BE_FALSE = ("attention_bias", "mlp_bias")


# What is a Qwen2 but for fields that are looked at below.
_EXPRESSIBLE: tuple[type[PreTrainedModel], ...] = (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
)


def mimo_from_llama(
    target: LlamaForCausalLM,
    num_mtp_layers: int = 1,
    mtp_feed: str = "post_norm",
    mtp_mask_position_0: bool = True,
) -> MiMoForCausalLM:
    """`mimo_from_decoder` for a Llama alone; TypeError for another model."""
    if not isinstance(target, LlamaForCausalLM):
        raise TypeError(
            f"target must be a LlamaForCausalLM, got {type(target).__name__}; mimo_from_decoder "
            "takes other families, too"
        )
    return mimo_from_decoder(target, num_mtp_layers, mtp_feed, mtp_mask_position_0)


def mimo_from_decoder(
    target: PreTrainedModel,
    num_mtp_layers: int = 1,
    mtp_feed: str = "post_norm",
    mtp_mask_position_0: bool = True,
) -> MiMoForCausalLM:
    """Express ``target`` as a MiMo with fresh MTP layers; its logits stay what they were.

    Args:
        target: a Llama without biases, a Qwen2 or a Mistral, without sliding windows. The result
            shares its tensors: changing one changes both.
        num_mtp_layers: layers to add; the first one makes every draft (see `MiMoMTP`).
        mtp_feed: see [`MiMoConfig`]; ``"post_norm"`` is the state that a training corpus holds.
        mtp_mask_position_0: see [`MiMoConfig`].

    Raises:
        TypeError: another model.
        ValueError: one of them that can't be expressed; the message names the field.
    """
    # Not a subclass: it can compute something else.
    if type(target) not in _EXPRESSIBLE:
        named = ", ".join(each.__name__ for each in _EXPRESSIBLE)
        raise TypeError(
            f"target must be one of {named}, got {type(target).__name__}; only these are known to "
            "be a Qwen2, and so a MiMo, exactly"
        )
    config = _config(target.config, num_mtp_layers, mtp_feed, mtp_mask_position_0)
    state = dict(target.state_dict())
    for name, tensor in state.items():
        if not is_plain(tensor):
            stored = tensor.dtype if type(tensor) is Tensor else type(tensor).__name__
            raise ValueError(
                f"target: {name} is {stored}, a quantized weight; load the target "
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
            state.setdefault(name.replace(".weight", ".bias"), weight.new_zeros(len(weight)))
    # Without memory of its own: every tensor is assigned.
    with torch.device("meta"):
        model = MiMoForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    rotary: Any = model.model.rotary_emb
    decoder: Any = target.base_model
    for name, buffer in decoder.rotary_emb.named_buffers():
        # As they are: computed anew they could differ, where the target was cast as a whole.
        rotary.register_buffer(name, buffer, persistent=False)
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.train(target.training)


def _config(source: PreTrainedConfig, num_mtp_layers: int, feed: str, mask: bool) -> MiMoConfig:
    for name in _MUST_BE_FALSE:
        if getattr(source, name, False):
            raise ValueError(
                f"target.config.{name}=True adds biases that a MiMo has no place for; only "
                f"targets with {name}=False can be expressed as one"
            )
    if _has_windows(source):
        raise ValueError(
            f"target.config.sliding_window={source.sliding_window} lets layers attend to a window, "
            "and the MTP layer of a MiMo would not; only targets that attend to everything can be "
            "expressed"
        )
    config = MiMoConfig(
        **{name: getattr(source, name) for name in _SAME if hasattr(source, name)},
        num_nextn_predict_layers=num_mtp_layers,
        mtp_feed=feed,
        mtp_mask_position_0=mask,
    )
    config._name_or_path = source._name_or_path
    config.dtype = source.dtype
    return config


def _has_windows(source: PreTrainedConfig) -> bool:
    """Whether a layer attends to a window only."""
    if getattr(source, "sliding_window", None) is None:
        return False
    types = getattr(source, "layer_types", None)
    # A Mistral says nothing of layers: all of them have the window.
    return types is None or "sliding_attention" in types


def _mtp_layer(decoder_layer: dict[str, Tensor], norm: Tensor, feed: str) -> dict[str, Tensor]:
    """Initial weights of one MTP layer, without biases.

    Args:
        decoder_layer: of the target's last layer; its biases are kept where it has them.
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
