"""The decoder layer of LongCat-Flash's MTP module: one latent attention and a dense MLP.

The target's own layers have two attentions and experts, so none of them fits. Source: the published
checkpoint's keys (``meituan-longcat/LongCat-Flash-Chat``, ``model.mtp.layers.0``).
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.models.longcat_flash.modeling_longcat_flash import (
    LongcatFlashMLA,
    LongcatFlashMLP,
    LongcatFlashRMSNorm,
)


class LongcatMTPBlock(nn.Module):
    """Pre-norm attention and MLP with residuals.

    Args:
        config: of the target.
        layer_idx: index in the cache.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LongcatFlashMLA(config, layer_idx)
        self.mlp = LongcatFlashMLP(config)
        self.input_layernorm = LongcatFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LongcatFlashRMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As transformers' decoder layers: [B, N, d] to [B, N, d]."""
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            cache=cache,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
