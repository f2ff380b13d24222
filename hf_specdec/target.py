"""Running the target model: the prefill, and the forward that verifies K + 1 tokens of every row.

The hidden state that drafters read is the tensor the output head (``lm_head``) is called with, that
is the output of the final norm at just the positions whose logits are computed. It is picked up by
a hook on the head, so no other layer's hidden states are kept and the prefill keeps one position.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from hf_specdec.attention import grouped_attention
from hf_specdec.cache import RaggedCache

# Slots added to the prompt at first; caches for long generations grow by doubling from there.
_INITIAL_SLOTS = 512


@dataclass(frozen=True)
class TargetOutput:
    """Logits ``[B, Q, V]`` in the model's dtype, and hidden states ``[B, Q, d]`` after the norm."""

    logits: torch.Tensor
    hidden_states: torch.Tensor


def attention_layers(model: PreTrainedModel) -> tuple[list[int | None], list[str]]:
    """Window (or ``None``) and layer type of each layer of the target's cache.

    Raises:
        ValueError: a layer keeps a state that can't be rolled back to an earlier token.
    """
    config = model.config.get_text_config(decoder=True)
    layer_types, kwargs = get_layer_types_and_kwargs(config)
    unsupported = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unsupported:
        raise ValueError(
            f"The target {type(model).__name__} has layers of type {', '.join(unsupported)}, whose "
            "state can't be rolled back after a rejected draft. Speculation works with targets "
            "whose layers are full_attention or sliding_attention; call generate() without "
            "assistant_model for this one."
        )
    return [layer_kwargs.get("sliding_window") for layer_kwargs in kwargs], layer_types


class TargetRunner:
    """The forwards of one ``generate`` call.

    Args:
        model: the target.
        input_ids: int64 ``[B, T]``, the left-padded prompts.
        padding: int64 ``[B]``, left padding of each row.
        max_query_length: most tokens verified in one forward (K + 1).
        max_length: longest row, prompt included, that this call can reach.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        max_query_length: int,
        max_length: int,
    ):
        # Any: generation methods are a mixin that PreTrainedModel doesn't declare.
        self.model: Any = model
        self._input_ids = input_ids
        self._max_length = max_length
        windows, layer_types = attention_layers(model)
        prompt_length = input_ids.shape[1]
        self.cache = RaggedCache(
            windows,
            layer_types,
            padding,
            max_query_length,
            num_slots=min(max_length, prompt_length + _INITIAL_SLOTS) + max_query_length,
        )
        parameters = inspect.signature(model.forward).parameters
        self._keep_logits = {"logits_to_keep": 0} if "logits_to_keep" in parameters else {}
        self._captured: torch.Tensor | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Pick up the hidden states while the block runs; no hook or switch is left behind."""
        head = self.model.get_output_embeddings()

        def keep(_module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            self._captured = arguments[0]

        handle = head.register_forward_pre_hook(keep)
        try:
            with grouped_attention(self.model):
                yield
        finally:
            handle.remove()

    def prefill(self, model_kwargs: dict[str, Any]) -> TargetOutput:
        """Run the prompt as transformers does; logits and state of the last position only.

        The cache then counts all but the last token, which is left to be accepted like the tokens
        of every later step.
        """
        self.cache.begin(self._input_ids.shape[1])
        inputs = self.model.prepare_inputs_for_generation(
            self._input_ids,
            is_first_iteration=True,
            **{**model_kwargs, "cache": self.cache, "use_cache": True},
        )
        output = self._call(inputs)
        rows, length = self._input_ids.shape[0], self._input_ids.shape[1] - 1
        self.cache.advance(self.cache.lengths.new_full((rows,), length), [length] * rows)
        return TargetOutput(output.logits[:, -1:], output.hidden_states[:, -1:])

    def verify(self, tokens: torch.Tensor) -> TargetOutput:
        """Run Q tokens of every active row.

        Args:
            tokens: int64 ``[n, Q]``: the last token of each row, then its draft.
        """
        # A row near the limit is drafted as far as the others; what lies behind the limit is never
        # emitted, but a model with a table of positions must find one for it.
        position_ids = self.cache.begin(tokens.shape[1]).clamp_(max=self._max_length - 1)
        return self._call(
            {
                "input_ids": tokens,
                "attention_mask": self._attention_mask(),
                "position_ids": position_ids,
                "cache": self.cache,
                "use_cache": True,
                **self._keep_logits,
            }
        )

    def _call(self, inputs: dict[str, Any]) -> TargetOutput:
        self._captured = None
        logits = self.model(**inputs, return_dict=True).logits
        if self._captured is None:
            raise RuntimeError(
                f"{type(self.model).__name__} computed logits without calling the module that "
                "get_output_embeddings() returns, so its hidden states can't be read for a drafter."
            )
        hidden_states, self._captured = self._captured, None
        return TargetOutput(logits, hidden_states)

    def _attention_mask(self) -> torch.Tensor | dict[str, torch.Tensor]:
        # Additive, and in the dtype of the scores: eager wants it so, and sdpa would convert a
        # boolean mask again in every layer.
        dtype = self.cache.dtype or self.model.dtype
        masks = {
            name: torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
            for name, mask in self.cache.attention_masks().items()
        }
        # Models with one kind of layer take the mask itself, the others look it up by layer type.
        return masks if len(masks) > 1 else next(iter(masks.values()))
