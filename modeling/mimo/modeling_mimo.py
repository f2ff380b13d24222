"""MiMo-7B: Qwen2, with MTP layers under ``model.mtp_layers.{i}``.

Boundary: networks alone. Generation is transformers' own; when the MTP layers draft, and what the
target makes of it, is the engine's business.

An MTP layer, for the state h_t of the target at position t and the token x_{t+1} that follows:

    z = input_proj([hidden_layernorm(h_t), token_layernorm(embed(x_{t+1}))])     [.., 2d] -> [.., d]
    y_t = final_layernorm(Qwen2 decoder layer(z))        attending to the layer's own earlier z
    logits of x_{t+2} = lm_head(y_t)

To go on, y_t takes the place of h_{t+1}. Source: the published checkpoints
(``XiaomiMiMo/MiMo-7B-Base`` and its siblings, arXiv 2505.07608).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
    Qwen2RMSNorm,
)

from hf_specdec.modeling.card_on_save import CardOnSave

from .configuration_mimo import MiMoConfig


class MiMoMTPLayer(Qwen2DecoderLayer):
    """One MTP layer; parameter names are the checkpoint's.

    Args:
        config: of the target.
    """

    def __init__(self, config: MiMoConfig) -> None:
        # Index 0: the layer is the only one of a cache of its own.
        super().__init__(config, layer_idx=0)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = Qwen2RMSNorm(size, eps=eps)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        hidden_first: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: h [B, N, d].
            inputs_embeds: embeddings of the tokens that follow [B, N, d].
            attention_mask: as for transformers' decoder layers.
            position_embeddings: of the positions of ``hidden_states``.
            cache: of this layer alone.
            hidden_first: the order in which the two are joined; the published one by default.
            kwargs: passed on to the decoder layer.

        Returns:
            y [B, N, d], what ``lm_head`` reads and what is recycled.
        """
        hidden = self.hidden_layernorm(hidden_states)
        token = self.token_layernorm(inputs_embeds)
        pair = [hidden, token] if hidden_first else [token, hidden]
        joined = self.input_proj(torch.cat(pair, dim=-1))
        output = super().forward(
            joined,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            cache=cache,
            use_cache=cache is not None,
            **kwargs,
        )
        return self.final_layernorm(output)


class MiMoModel(Qwen2Model):
    """Qwen2's decoder, and the MTP layers, which its forward doesn't run."""

    config: MiMoConfig
    config_class = MiMoConfig

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config)
        layers = range(config.num_nextn_predict_layers)
        self.mtp_layers = nn.ModuleList([MiMoMTPLayer(config) for _ in layers])
        self.post_init()


class MiMoForCausalLM(CardOnSave, Qwen2ForCausalLM):  # type: ignore[misc]
    """MiMo-7B with its head; loads and saves the published layout, MTP layers included."""

    config: MiMoConfig
    config_class = MiMoConfig
    _no_split_modules = ["Qwen2DecoderLayer", "MiMoMTPLayer"]

    def __init__(self, config: MiMoConfig) -> None:
        # Not Qwen2ForCausalLM's: it would build a decoder that is thrown away.
        Qwen2PreTrainedModel.__init__(self, config)
        self.model = MiMoModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
