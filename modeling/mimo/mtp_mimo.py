"""The MTP layers of a loaded MiMo as a drafter network.

Boundary: one pass of the layer on tensors. The order of passes, the cache, and what is accepted are
the engine's business (`hf_specdec.drafters.mtp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from hf_specdec.modeling.mtp import Feed, MTPSwitches
from hf_specdec.modeling.placement import head_device, offloaded_weight
from hf_specdec.modeling.quantized import is_plain

from .configuration_mimo import check_draft_token_ids
from .modeling_mimo import MiMoForCausalLM


class _DraftRows:
    """The rows [V', d] of a head for some ids, gathered once, and what they were taken from."""

    def __init__(self, ids: list[int], target: MiMoForCausalLM) -> None:
        head = target.lm_head.weight
        self._ids, self._head, self._state = ids, head, _state(head)
        device, plain = head_device(target), is_plain(head)
        if head.device.type == "meta":
            # Offloaded: only the rows are kept.
            head = offloaded_weight(target.lm_head)
        rows = torch.tensor(ids, device=head.device)
        self.token_ids = rows.to(device)
        # Of a quantized head no rows can be taken: it is run as a whole, and columns are.
        self.weight = head.detach()[rows].to(device) if plain else None

    def are_of(self, ids: list[int], head: Tensor) -> bool:
        """Whether they are of this head, which was neither moved nor written to since."""
        # accelerate makes another parameter of an offloaded head in every forward.
        is_same = self._head is head or head.device.type == "meta"
        return self._ids is ids and is_same and self._state == _state(head)


def _state(tensor: Tensor) -> tuple[int, int] | None:
    if tensor.device.type == "meta":
        return None
    # Tensors made in inference mode count no writes.
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


class MiMoMTP:
    """Shares everything with the target it is made of.

    The only weights it holds itself are a copy of the head's rows for ``mtp_draft_token_ids``, if
    the config names any.

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
        self._rows: _DraftRows | None = None

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

    def follow_target(self) -> None:
        """Nothing to do: the layer is a part of the target."""

    @property
    def draft_token_ids(self) -> Tensor | None:
        """Ids of the columns of `logits`, int64 [V'] ascending; ``None`` means all of them."""
        rows = self._draft_rows()
        return None if rows is None else rows.token_ids

    @property
    def head_weight(self) -> Tensor:
        """The output table of a draft: the head's, [V, d], or its rows for the draft ids."""
        rows = self._draft_rows()
        table = self.target.lm_head.weight if rows is None else rows.weight
        if table is None or not is_plain(table):
            raise ValueError(
                "the target's lm_head is quantized, so its rows can't be read; load the target "
                "with the lm_head left out of the quantization"
            )
        return table

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embeddings [B, N, d] of the tokens that follow the states at ``position_ids`` [B, N]."""
        embeds: Tensor = self.target.model.embed_tokens(token_ids)
        if self.switches.mask_position_0:
            # The embedding's device may not be the positions'.
            embeds = embeds.to(position_ids.device)
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
        """Logits [.., V'] of the target's head, for the ids that can be drafted."""
        rows = self._draft_rows()
        if rows is None:
            return self.target.lm_head(hidden_states)
        if rows.weight is None:
            return self.target.lm_head(hidden_states)[..., rows.token_ids]
        return F.linear(hidden_states, rows.weight)

    def _draft_rows(self) -> _DraftRows | None:
        ids, weight = self.config.mtp_draft_token_ids, self.target.lm_head.weight
        if ids is None:
            return None
        if self._rows is None or not self._rows.are_of(ids, weight):
            check_draft_token_ids(ids, self.config.vocab_size)
            self._rows = _DraftRows(ids, self.target)
        return self._rows
