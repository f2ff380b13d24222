"""The MTP layers of a loaded MiMo as a drafter network.

Boundary: one pass of the layer on tensors. The order of passes, the cache, and what is accepted are
the engine's business (`hf_specdec.drafters.mtp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import Cache

from hf_specdec.modeling.mtp import Feed, MTPSwitches

from .modeling_mimo import MiMoForCausalLM


class MiMoMTP:
    """Shares everything with the target it is made of, and holds no weights of its own.

    Where a checkpoint has several MTP layers the first one makes every step, as in other runtimes;
    published checkpoints have one.

    Args:
        target: a loaded [`MiMoForCausalLM`].

    Raises:
        TypeError: for another model.
        ValueError: if it has no MTP layers.
    """

    def __init__(self, target: MiMoForCausalLM) -> None:
        if not isinstance(target, MiMoForCausalLM):
            raise TypeError(f"MiMoMTP needs a MiMoForCausalLM, got {type(target).__name__}")
        if len(target.model.mtp_layers) == 0:
            raise ValueError(
                "the target has num_nextn_predict_layers=0: its checkpoint was loaded without MTP "
                "layers, so it can't draft for itself"
            )
        self.target = target
        self._changes: dict[str, Any] = {}

    @property
    def config(self) -> Any:
        """The target's config."""
        return self.target.config

    @property
    def n_predict(self) -> int:
        """Tokens a step drafts by default: one for each MTP layer."""
        return self.config.num_nextn_predict_layers

    @property
    def num_modules(self) -> int:
        """Modules that are run in turn: the first layer."""
        return 1

    @property
    def switches(self) -> MTPSwitches:
        """How the layer is fed: as the config says, unless `with_switches` changed it."""
        return replace(
            MTPSwitches(
                feed=self.config.mtp_feed,
                hidden_first=True,
                mask_position_0=self.config.mtp_mask_position_0,
            ),
            **self._changes,
        )

    def with_switches(self, **changes: Any) -> MiMoMTP:
        """The same layer, fed in another way; [`MTPSwitches`] names what can be changed."""
        other = MiMoMTP(self.target)
        other._changes = {**self._changes, **changes}
        return other

    @property
    def token_shift(self) -> int:
        """Entry i is paired with the token at i + this."""
        return self.switches.token_shift

    @property
    def layer_types(self) -> list[str]:
        """The layer attends to everything."""
        return ["full_attention"]

    @property
    def layer_windows(self) -> list[int | None]:
        """No window."""
        return [None]

    @property
    def feed(self) -> Feed:
        """Which state of the target it reads."""
        return self.switches.feed

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embeddings [B, N, d] of the tokens that follow the states at ``position_ids`` [B, N]."""
        embeds: Tensor = self.target.model.embed_tokens(token_ids)
        if self.switches.mask_position_0:
            embeds = embeds.masked_fill((position_ids == 0)[..., None], 0.0)
        return embeds

    def __call__(
        self,
        hidden_states: Tensor,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        masks: Mapping[str, Tensor] | None = None,
        cache: Cache | None = None,
        module: int = 0,
    ) -> Tensor:
        """Run the layer; see [`MiMoMTPLayer`]. The result is for the head, and to be recycled."""
        layer: Any = self.target.model.mtp_layers[0]
        hidden_states = hidden_states.to(inputs_embeds.dtype)
        return layer(
            hidden_states,
            inputs_embeds,
            attention_mask=(masks or {}).get("full_attention"),
            position_embeddings=self.target.model.rotary_emb(
                hidden_states, position_ids + self.switches.position_offset
            ),
            cache=cache,
            hidden_first=self.switches.hidden_first,
        )

    def logits(self, hidden_states: Tensor, module: int = 0) -> Tensor:
        """Logits [.., V] of the target's head."""
        return self.target.lm_head(hidden_states)
