"""A Gemma 4 assistant as a drafter network: one step at a time, over the target's keys and values.

The networks are transformers' own (``gemma4_assistant``, ``gemma4_unified_assistant``); what is
here runs their modules for one token of every row, without the host waiting for a device and
without logits nobody needs. An assistant has no keys of its own: every layer attends to those of
the target's last layer of the same type that computes any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantForCausalLM,
    PreTrainedConfig,
)

from hf_specdec.modeling.largest import index_of_largest

from .switches import Gemma4MTPSwitches

ASSISTANTS: tuple[Any, ...] = (Gemma4AssistantForCausalLM, Gemma4UnifiedAssistantForCausalLM)
"""The classes of transformers that load the published checkpoints."""
# Where a head notes which table of ids was looked at.
_CHECKED = "_hf_specdec_checked"
States = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By layer type, keys and values ``[B, heads, T, dim]`` of a target."""


def shared_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Which layer of a target an assistant's layers of each type attend to.

    Args:
        config: the target's text config.

    Returns:
        By layer type the index of the last layer that computes keys; empty if the model shares
        none.
    """
    modes = getattr(config, "kv_sharing_modes", None) or ()
    types: Any = getattr(config, "layer_types", None)
    return {types[i]: i for i, mode in enumerate(modes) if mode == "store"}


class Gemma4MTP:
    """An assistant, run step by step.

    Args:
        model: a ``Gemma4AssistantForCausalLM`` or ``Gemma4UnifiedAssistantForCausalLM``.
        switches: how it is fed.
    """

    def __init__(self, model: Any, switches: Gemma4MTPSwitches | None = None):
        if not isinstance(model, ASSISTANTS):
            names = " or ".join(cls.__name__ for cls in ASSISTANTS)
            raise TypeError(f"Gemma4MTP needs a {names}, got {type(model).__name__}")
        self.model = model
        self.switches = switches or Gemma4MTPSwitches()
        # What was asked for, and the mask made of it.
        self._suppressed: tuple[Any, torch.Tensor] | None = None

    def with_switches(self, **changes: Any) -> Gemma4MTP:
        """The same weights, fed in another way."""
        return Gemma4MTP(self.model, replace(self.switches, **changes))

    @property
    def config(self) -> Any:
        """Of the assistant's decoder."""
        return self.model.config.get_text_config()

    @property
    def backbone_hidden_size(self) -> int:
        """Width of the target it was trained with."""
        return self.model.config.backbone_hidden_size

    @property
    def layer_types(self) -> list[str]:
        """The types of attention of its layers, each once."""
        return sorted(set(self.config.layer_types))

    def check_token_ordering(self) -> None:
        """Refuse a centroid head whose table doesn't name every id once.

        Looked at once for every content of the table, as that makes the host wait for the device.

        Raises:
            ValueError: naming the buffer.
        """
        head = self.model.masked_embedding
        if head is None or head.token_ordering.is_meta:
            return
        table = head.token_ordering
        state = (table.data_ptr(), table._version, len(table))
        if head.__dict__.get(_CHECKED) == state:
            return
        size = self.config.vocab_size
        if size % head.num_centroids or table.dtype != torch.int64 or table.numel() != size:
            raise ValueError(
                f"masked_embedding.token_ordering of the assistant is {table.dtype} "
                f"{list(table.shape)}; it must hold vocab_size={size} int64 ids, the same number "
                f"for each of num_centroids={head.num_centroids}"
            )
        if not bool(
            (table.flatten().sort().values == torch.arange(size, device=table.device)).all()
        ):
            raise ValueError(
                f"masked_embedding.token_ordering of the assistant must name each id of 0 to "
                f"{size - 1} once; it has ids of {int(table.min())} to {int(table.max())}, "
                f"{len(table.unique())} of them distinct. Download the checkpoint again"
            )
        head.__dict__[_CHECKED] = state

    def step(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        shared: States,
        masks: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """One draft step.

        Args:
            embeds: ``[B, D]``, the newest token by the target's (scaled) embedding.
            states: ``[B, D]``, the target's state, or what `recycle` made of the last step's.
            position_ids: int64 ``[B, 1]``.
            shared: by layer type, the target's keys and values; read where they are.
            masks: by layer type ``[B, 1, 1, T]``, added to the scores.

        Returns:
            ``[B, d]`` behind the assistant's final norm.
        """
        joined = self.model.pre_projection(torch.cat([embeds, states], dim=-1))
        output = self.model.model(
            inputs_embeds=joined[:, None],
            attention_mask=dict(masks),
            position_ids=position_ids,
            shared_kv_states=dict(shared),
            use_cache=False,
        )
        return output.last_hidden_state[:, 0]

    def recycle(self, states: torch.Tensor) -> torch.Tensor:
        """What takes the place of the target's state in the next step: ``[B, d]`` to ``[B, D]``."""
        return self.model.post_projection(states)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, V]``; -inf for suppressed ids, and for those the centroid head leaves out."""
        if self.model.masked_embedding is None:
            return self._suppress(self._softcap(self.model.lm_head(states)))
        scores, ids = self._select(states)
        full = scores.new_full((scores.shape[0], self.config.vocab_size), -torch.inf)
        return full.scatter_(1, ids, self._softcap(scores))

    def most_likely(self, states: torch.Tensor) -> torch.Tensor:
        """Ids int64 ``[B]`` of the largest logits; the centroid head never scores the others."""
        if self.model.masked_embedding is None:
            return index_of_largest(self._suppress(self.model.lm_head(states)))
        scores, ids = self._select(states)
        return ids.gather(1, index_of_largest(scores)[:, None])[:, 0]

    def _select(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and ids ``[B, S]`` of the tokens that belong to the nearest centroids."""
        head = self.model.masked_embedding
        nearest = head.centroids(states).topk(head.centroid_intermediate_top_k, dim=-1).indices
        clusters = head.token_ordering.view(head.num_centroids, -1)
        ids = clusters[nearest].flatten(1)
        scores = (self.model.lm_head.weight[ids] @ states[:, :, None])[:, :, 0]
        hidden = self._suppressed_ids()
        if hidden is not None:
            scores = scores.masked_fill(hidden[ids], -torch.inf)
        return scores, ids

    def _softcap(self, logits: torch.Tensor) -> torch.Tensor:
        # As in the target and in vLLM. It keeps the order, so that argmax can do without.
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _suppress(self, logits: torch.Tensor) -> torch.Tensor:
        hidden = self._suppressed_ids()
        return logits if hidden is None else logits.masked_fill(hidden, -torch.inf)

    def _suppressed_ids(self) -> torch.Tensor | None:
        """bool ``[V]``, ids that the checkpoint says are never to be drafted; ``None`` if none."""
        said = getattr(self.model.generation_config, "suppress_tokens", None)
        if not said:
            return None
        key = (tuple(said), self.model.device)
        if self._suppressed is None or self._suppressed[0] != key:
            hidden = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            hidden[[i for i in said if i < len(hidden)]] = True
            self._suppressed = key, hidden.to(self.model.device)
        return self._suppressed[1]
