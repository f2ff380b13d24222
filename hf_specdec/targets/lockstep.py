"""Targets with recurrent or convolutional layers: rows that advance together, and states put back.

Such a layer keeps one state for all that went before, not an entry for every token, so nothing can
be rolled back by shortening it, and rows of different lengths can't share a forward. transformers'
own cache is kept, every row keeps as many tokens of a forward as the row that accepted fewest, and
a rejected draft is undone in one of two ways:

* convolutional states hold the last few inputs and are cut (``Cache.crop``);
* recurrent states are put back to a copy made before the forward, and the tokens that were kept run
  again *together with the next step's*. The copy stays where it is until a step keeps everything;
  after `MAX_PENDING` tokens they are run on their own, so that forwards stay short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.target import TargetOutput, TargetRunner

# Kept tokens that wait to be run again; about what costs nothing on an accelerator.
MAX_PENDING = 16

MODEL_TYPES = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    }
)
"""Model types whose forward continues a recurrent state over several tokens, each with a test.

Not every one does: Jamba's, for one, begins anew. nemotron_h clamps its time steps at
``time_step_min`` in forwards over several tokens and not in those over one (transformers 5.24), so
there the two differ by more than rounding where a step is shorter than that.
"""

_States = dict[str, dict[int, Any]]


class LockstepTarget(TargetRunner):
    """A target of `MODEL_TYPES`; arguments as for `TargetRunner`, and:

    Args:
        given: a filled transformers cache whose tokens the prompt begins with; not modified.
    """

    advances_together: ClassVar[bool] = True
    cache: Cache

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        max_query_length: int,
        max_length: int,
        collect: dict[str, bool] | None = None,
        given: Cache | None = None,
    ):
        super().__init__(model, prompt, max_query_length, max_length, collect)
        config = model.config.get_text_config(decoder=True)
        self.cache = DynamicCache(config=config)
        self._num_tokens = 0
        if given is not None and given.get_seq_length() > 0:
            _copy_layers(given, self.cache)
            self._num_tokens = given.get_seq_length()
        self._offsets = prompt.offsets
        self._mask = None
        if prompt.hidden is not None:
            self._mask = (~prompt.hidden).long()
        elif bool(prompt.padding.any()):
            slots = torch.arange(prompt.num_slots, device=prompt.padding.device)
            self._mask = (slots >= prompt.padding[:, None]).long()
        self._saved: list[_States] | None = None
        self._pending = prompt.input_ids[:, :0]
        self._run = self._pending
        self._rows_left = False
        self._reruns = False

    def _length(self) -> int:
        return self._num_tokens

    def _set_offsets(self, offsets: torch.Tensor) -> None:
        self._offsets = offsets

    def _begin_prompt(self, query_length: int) -> None:
        pass

    def _advance_prompt(self, count: int, rows: int) -> None:
        # The prompt's last token is in the cache already; `advance` counts it.
        self._num_tokens += count
        self._run = self._run.new_zeros((rows, 1))
        self._reruns = any(
            isinstance(layer, LinearAttentionCacheLayerMixin)
            and any(layer.is_recurrent_states_initialized.values())
            for layer in self.cache.layers
        )

    def verify(self, tokens: torch.Tensor) -> TargetOutput:
        """See `TargetRunner.verify`; tokens still to be run again come first."""
        width = tokens.shape[1]
        if width > 1 or self._pending.shape[1]:
            self._prepare_roll_back()
        self._run = torch.cat([self._pending, tokens], dim=1)
        output = self._forward(self._run, width)
        return TargetOutput(
            output.logits[:, -width:],
            output.hidden_states[:, -width:],
            output.all_hidden_states,
            output.attentions,
        )

    def advance(self, num_tokens: torch.Tensor, host_num_tokens: Sequence[int]) -> None:
        """See `TargetRunner.advance`; all numbers are the same."""
        count = host_num_tokens[0]
        assert all(n == count for n in host_num_tokens)
        kept = self._pending.shape[1] + count
        rejected = self._run.shape[1] - kept
        self._num_tokens += count
        if not self._reruns or rejected == 0:
            # crop(0) also drops what windows and convolutions recorded for a roll-back.
            self._crop(rejected)
            self._saved, self._pending = None, self._run[:, :0]
        else:
            self._put_back()
            self._pending = self._run[:, :kept]
            if kept > MAX_PENDING:
                self._commit()

    def keep_rows(self, order: Sequence[int]) -> None:
        """See `TargetRunner.keep_rows`."""
        if list(order) == list(range(self._pending.shape[0])):
            return
        index = torch.tensor(order, device=self._offsets.device)
        self._rows_left = True
        self.cache.reorder_cache(cast(torch.LongTensor, index))
        self._offsets, self._pending = self._offsets[index], self._pending[index]
        if self._shifts is not None:
            self._shifts = self._shifts[:, index]
        if self._mask is not None:
            self._mask = self._mask[index]
        for states in self._saved or []:
            for group in states.values():
                for i, value in group.items():
                    if isinstance(value, torch.Tensor):
                        group[i] = value.index_select(0, index.to(value.device))

    def hand_out(
        self, cache: Cache, last_tokens: torch.Tensor, lengths: Sequence[int]
    ) -> Cache | None:
        """See `TargetRunner.hand_out`."""
        if self._rows_left:
            return None
        if self._pending.shape[1]:
            self._commit()
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
        cache.layers = self.cache.layers
        return cache

    def _forward(self, tokens: torch.Tensor, num_logits: int) -> TargetOutput:
        """Run tokens behind those in the cache."""
        start = self._num_tokens - self._pending.shape[1]
        slots = start + torch.arange(tokens.shape[1], device=tokens.device)
        mask = None
        if self._mask is not None:
            behind = start + tokens.shape[1] - self._mask.shape[1]
            mask = torch.nn.functional.pad(self._mask, (0, behind), value=1)
        last = self._max_length - 1 - self._offsets[:, None]
        positions = torch.minimum(slots - self._offsets[:, None], last).clamp_(min=0)
        return self._call(
            {
                "input_ids": tokens,
                "attention_mask": mask,
                "position_ids": self._along_axes(positions),
                "cache": self.cache,
                "use_cache": True,
                **self._keep_logits(num_logits),
            }
        )

    def _prepare_roll_back(self) -> None:
        """Before a forward: record what a roll-back needs."""
        for layer in self.cache.layers:
            # Recurrent layers are copied; their convolutions would record without need.
            if isinstance(layer, DynamicSlidingWindowLayer) or (
                isinstance(layer, LinearAttentionCacheLayerMixin) and not self._reruns
            ):
                layer.record_past = True
        if self._reruns and self._saved is None:
            self._saved = [
                _copy_states(layer)
                for layer in self.cache.layers
                if isinstance(layer, LinearAttentionCacheLayerMixin)
            ]

    def _put_back(self) -> None:
        """Undo the last forward altogether."""
        assert self._saved is not None
        linear = [
            layer
            for layer in self.cache.layers
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        ]
        for layer, states in zip(linear, self._saved, strict=True):
            for name, group in states.items():
                target = getattr(layer, name)
                for i, value in group.items():
                    # Forwards write in place, and the copy may be needed again.
                    target[i] = value.clone() if isinstance(value, torch.Tensor) else value
        self._crop(self._run.shape[1])

    def _crop(self, count: int) -> None:
        """Cut the last tokens off attention layers and, where they record, convolutions."""
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin) and not self._reruns:
                if layer.record_past:
                    layer.crop(-count)
            elif isinstance(layer, DynamicSlidingWindowLayer):
                if layer.record_past and layer.is_initialized:
                    DynamicSlidingWindowLayer.crop(layer, -count)
            elif isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, -count)

    def _commit(self) -> None:
        """Run the kept tokens on their own, from the copy."""
        self._forward(self._pending, 1)
        self._saved, self._pending = None, self._pending[:, :0]
        self._crop(0)


def _copy_states(layer: LinearAttentionCacheLayerMixin) -> _States:
    names = ("conv_states", "recurrent_states", "has_previous_state")
    return {
        name: {
            i: value.clone() if isinstance(value, torch.Tensor) else value
            for i, value in getattr(layer, name).items()
        }
        for name in names
    }


def _copy_layers(source: Cache, target: Cache) -> None:
    """Copy a filled cache: forwards write to recurrent states in place."""
    for old, new in zip(source.layers, target.layers, strict=True):
        for name, value in vars(old).items():
            if isinstance(value, dict):
                value = {
                    k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in value.items()
                }
            setattr(new, name, value)
