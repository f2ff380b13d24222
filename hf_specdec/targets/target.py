"""Running the target model: the prompt, and the forward that verifies K + 1 tokens of every row.

The hidden state that most drafters read is the tensor the output head (``lm_head``) is called with:
the output of the final norm at just the positions whose logits are computed. It is picked up by a
hook on the head, so no other layer's hidden states are kept and the prompt leaves one position.
Drafters that read the whole prompt, or the state before the norm, get it from a hook on the norm.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_specdec.caches.cache_layers import RaggedIndexedLayer
from hf_specdec.caches.ragged_cache import RaggedCache
from hf_specdec.devices import moved_once
from hf_specdec.modeling.mtp import final_norm
from hf_specdec.modeling.placement import devices_of
from hf_specdec.targets.attention import additive
from hf_specdec.targets.layer_types import attention_layers
from hf_specdec.targets.masked_attention import implementation_of, takes_booleans
from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.switches import switched
from hf_specdec.tree import TokenTree

# Slots added to the prompt at first; caches for long generations grow by doubling from there.
_INITIAL_SLOTS = 512
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass(frozen=True)
class TargetOutput:
    """One forward.

    Attributes:
        logits: ``[B, Q, V]`` in the model's dtype.
        hidden_states: ``[B, Q, d]``, what the drafter reads.
        all_hidden_states: for each layer ``[B, Q', d]`` if the call collects them, where the last
            Q of the Q' tokens are those of ``logits``; else ``None``.
        attentions: for each layer ``[B, H, Q', keys]`` if the call collects them, else ``None``.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor
    all_hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class TargetRunner(ABC):
    """The forwards of one ``generate`` call; subclasses differ in the cache they keep.

    Args:
        model: the target.
        prompt: see `Prompt`.
        max_query_length: most tokens verified in one forward (K + 1, or 1 + N of a tree).
        max_length: slots of the longest row, prompt included, that this call can reach.
        collect: ``output_hidden_states`` and ``output_attentions``, as far as asked for.
    """

    advances_together: ClassVar[bool] = False
    """Whether every row must keep the same number of tokens of a forward."""
    cache: Cache

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        max_query_length: int,
        max_length: int,
        collect: dict[str, bool] | None = None,
    ):
        # Any: generation methods are a mixin that PreTrainedModel doesn't declare.
        self.model: Any = model
        self._prompt = prompt
        # Of the active rows.
        self._shifts = prompt.shifts
        self._max_length = max_length
        self._collect = {name: True for name, wanted in (collect or {}).items() if wanted}
        parameters = inspect.signature(model.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._captured: torch.Tensor | None = None
        self._thread = threading.get_ident()
        self._whole_prompt = False

    @contextmanager
    def capture(self, feed: str = "post_norm", whole_prompt: bool = False) -> Iterator[None]:
        """Pick up the hidden states while the block runs; no hook or switch is left behind.

        Args:
            feed: ``"post_norm"``, the states behind the final norm, or ``"pre_norm"``.
            whole_prompt: whether `prefill` returns the states of all positions.
        """
        self._thread = threading.get_ident()
        self._whole_prompt = whole_prompt

        def keep(states: torch.Tensor) -> None:
            # Another thread may run the same target.
            if threading.get_ident() == self._thread:
                self._captured = states

        if feed == "post_norm" and not whole_prompt:
            head = self.model.get_output_embeddings()
            handle = head.register_forward_pre_hook(lambda _module, args: keep(args[0]))
        elif feed == "post_norm":
            norm = final_norm(self.model)
            handle = norm.register_forward_hook(lambda _module, _args, output: keep(output))
        else:
            norm = final_norm(self.model)
            handle = norm.register_forward_pre_hook(lambda _module, args: keep(args[0]))
        try:
            with switched(self.model):
                yield
        finally:
            handle.remove()

    def prefill(self, model_kwargs: dict[str, Any], chunk_size: int | None = None) -> TargetOutput:
        """Run the prompt, or what a given cache lacks of it, as transformers does.

        The cache then counts all but the last token, which is left to be accepted like the tokens
        of every later step.

        Args:
            model_kwargs: what ``generate`` prepared for the first forward.
            chunk_size: tokens per forward (``prefill_chunk_size``); all at once by default.

        Returns:
            Logits of the last position only, and its state or that of all positions just run.
        """
        start, end = self._length(), self._prompt.num_slots
        size = chunk_size or end - start
        states = []
        while start < end:
            stop = min(start + size, end)
            output = self._run_prompt(model_kwargs, start, stop)
            start = stop
            states.append(
                output.hidden_states if self._whole_prompt else output.hidden_states[:, -1:]
            )
        return TargetOutput(
            output.logits[:, -1:],
            torch.cat(states, dim=1) if self._whole_prompt else states[-1],
            output.all_hidden_states,
            output.attentions,
        )

    def _run_prompt(self, model_kwargs: dict[str, Any], start: int, stop: int) -> TargetOutput:
        """Slots ``start .. stop - 1``; all of them, but for the prompt's last one, then count."""
        prompt = self._prompt
        kwargs = {**model_kwargs, "cache": self.cache, "use_cache": True}
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"][:, :stop]
        if (positions := kwargs.get("position_ids")) is not None:
            # The last column belongs to the prompt's last slot.
            behind = prompt.num_slots - stop
            kwargs["position_ids"] = positions[..., : positions.shape[-1] - behind]
        for name in _PER_TOKEN:
            if (types := kwargs.get(name)) is not None:
                kwargs[name] = types[..., : types.shape[-1] - (prompt.num_slots - stop)]
        if prompt.embeds is not None:
            kwargs["inputs_embeds"] = prompt.embeds[:, start:stop]
        before = prompt.slots_before
        ids = prompt.input_ids[:, max(start - before, 0) : max(stop - before, 0)]
        self._begin_prompt(stop - start)
        inputs = self.model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
        # Phi-3 drops it from a long prompt, to begin anew where its frequencies change.
        inputs["cache"] = self.cache
        if "position_ids" in inputs and inputs["position_ids"] is None:
            # The model takes slots for positions, padding included (Exaone 4.5).
            self._set_offsets(torch.zeros_like(prompt.offsets))
        output = self._call(inputs)
        count = stop - start - (stop == prompt.num_slots)
        rows = prompt.num_rows
        self._advance_prompt(count, rows)
        return output

    def _call(self, inputs: dict[str, Any]) -> TargetOutput:
        self._captured = None
        output = self.model(**{**inputs, **self._collect, "return_dict": True})
        if self._captured is None:
            raise RuntimeError(
                f"{type(self.model).__name__} computed logits without calling the module that "
                "get_output_embeddings() returns, or its final norm, so its hidden states can't be "
                "read for a drafter."
            )
        # Where the head is, or the norm, if these are on different devices.
        hidden_states = self._captured.to(self._prompt.padding.device)
        self._captured = None
        return TargetOutput(
            output.logits,
            hidden_states,
            output.hidden_states if "output_hidden_states" in self._collect else None,
            output.attentions if "output_attentions" in self._collect else None,
        )

    def _along_axes(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Positions int64 ``[n, Q]`` as the model takes them: ``[C, n, Q]`` if it has C axes."""
        if self._shifts is None:
            return position_ids
        return position_ids + self._shifts[..., None]

    def _keep_logits(self, count: int) -> dict[str, int]:
        return {"logits_to_keep": count} if self._takes_logits_to_keep else {}

    @abstractmethod
    def _length(self) -> int:
        """Tokens in the cache before the prompt is run."""

    @abstractmethod
    def _set_offsets(self, offsets: torch.Tensor) -> None:
        """Slot minus position is ``offsets`` (int64 ``[B]``) in every row, not as in the prompt."""

    @abstractmethod
    def _begin_prompt(self, query_length: int) -> None:
        """Announce a forward over a part of the prompt."""

    @abstractmethod
    def _advance_prompt(self, count: int, rows: int) -> None:
        """Count ``count`` tokens of the part just run in each of ``rows`` rows."""

    @abstractmethod
    def verify(self, tokens: torch.Tensor) -> TargetOutput:
        """Run Q tokens of every active row.

        Args:
            tokens: int64 ``[n, Q]``: the last token of each row, then its draft.
        """

    @abstractmethod
    def advance(self, num_tokens: torch.Tensor, host_num_tokens: Sequence[int]) -> None:
        """Keep the first ``num_tokens`` (int64 ``[n]``, and on the host) of the last forward."""

    @abstractmethod
    def keep_rows(self, order: Sequence[int]) -> None:
        """Row i of the smaller batch is the present row ``order[i]``."""

    @abstractmethod
    def hand_out(
        self, cache: Cache, last_tokens: torch.Tensor, lengths: Sequence[int]
    ) -> Cache | None:
        """Put what this call computed in ``cache``, which the caller goes on with.

        Args:
            cache: transformers' own.
            last_tokens: int64 ``[B]``, the last token of every row of the whole batch.
            lengths: slots of every row, that token not counted.

        Returns:
            ``cache``, or ``None`` if rows that finished early are no longer there.
        """


class RaggedTarget(TargetRunner):
    """A target whose layers are all attention: rows advance each by its own number of tokens.

    Args:
        given: a filled transformers cache whose tokens the prompt begins with.
        retain: whether `hand_out` will be called.
        cache_class: makes the cache.
    """

    cache: RaggedCache

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        max_query_length: int,
        max_length: int,
        collect: dict[str, bool] | None = None,
        given: Cache | None = None,
        retain: bool = False,
        cache_class: Callable[..., RaggedCache] = RaggedCache,
    ):
        super().__init__(model, prompt, max_query_length, max_length, collect)
        windows, types = attention_layers(model)
        self.cache = cache_class(
            windows,
            types,
            prompt.padding,
            max_query_length,
            num_slots=min(max_length, prompt.num_slots + _INITIAL_SLOTS) + max_query_length,
            offsets=prompt.offsets,
            hidden=prompt.hidden,
            retain=retain,
        )
        self._is_spread = len(devices_of(model)) > 1
        # The position of the last token that a row can emit.
        self._last_positions = max_length - 1 - prompt.offsets
        if given is not None and given.get_seq_length() > 0:
            layers: list[Any] = given.layers
            states = [
                # A layer without keys of its own is initialized, and has none.
                None if getattr(layer, "keys", None) is None else (layer.keys, layer.values)
                for layer in layers
            ]
            self.cache.load(states, given.get_seq_length())
            for own, layer in zip(self.cache.ragged_layers, layers, strict=True):
                if isinstance(own, RaggedIndexedLayer) and layer.is_indexer_initialized:
                    own.load_index_keys(layer.indexer_keys)

    def _length(self) -> int:
        return self.cache.host_length

    def _set_offsets(self, offsets: torch.Tensor) -> None:
        self._prompt = replace(self._prompt, offsets=offsets)
        self.cache.offsets = offsets
        self._last_positions = self._max_length - 1 - offsets

    def _begin_prompt(self, query_length: int) -> None:
        self.cache.begin(query_length, prompt=True)

    def _advance_prompt(self, count: int, rows: int) -> None:
        self.cache.advance(self.cache.lengths.new_full((rows,), count), [count] * rows)

    def verify(self, tokens: torch.Tensor, tree: TokenTree | None = None) -> TargetOutput:
        """See `TargetRunner.verify`; with a ``tree`` the drafts are its nodes, not a chain."""
        # A row near the limit is drafted as far as the others; what lies behind the limit is never
        # emitted, but a model with a table of positions must find one for it.
        positions = self.cache.begin(tokens.shape[1], tree=tree)
        position_ids = torch.minimum(positions, self._last_positions[:, None])
        position_ids = self._along_axes(position_ids)
        masks = self._attention_masks()
        with moved_once((*masks.values(), position_ids) if self._is_spread else ()):
            return self._call(
                {
                    "input_ids": tokens,
                    # Models with one kind of layer take the mask itself, others look it up.
                    "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
                    "position_ids": position_ids,
                    "cache": self.cache,
                    "use_cache": True,
                    **self._keep_logits(0),
                }
            )

    def advance(self, num_tokens: torch.Tensor, host_num_tokens: Sequence[int]) -> None:
        """See `TargetRunner.advance`."""
        self.cache.advance(num_tokens, host_num_tokens)

    def keep_rows(self, order: Sequence[int]) -> None:
        """See `TargetRunner.keep_rows`."""
        self.cache.keep_rows(order)
        index = torch.tensor(order, device=self._last_positions.device)
        self._last_positions = self._last_positions[index]
        if self._shifts is not None:
            self._shifts = self._shifts[:, index]

    def hand_out(self, cache: Cache, last_tokens: torch.Tensor, lengths: Sequence[int]) -> Cache:
        """See `TargetRunner.hand_out`; keys and values are views as long as rows stay in place."""
        self.cache.restore_rows(lengths, self._prompt.offsets)
        if min(lengths) < max(lengths):
            # Rows that ended early left before their last token was run; plain generation runs it.
            self._last_positions = self._max_length - 1 - self._prompt.offsets
            self._shifts = self._prompt.shifts
            self.verify(last_tokens[:, None])
        states, length = self.cache.unload()
        empty = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        layers: list[Any] = empty.layers
        for layer, pair in zip(layers, states, strict=True):
            if pair is None:
                continue
            layer.lazy_initialization(*pair)
            layer.keys, layer.values = pair
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length
        for own, layer in zip(self.cache.ragged_layers, layers, strict=True):
            if isinstance(own, RaggedIndexedLayer) and own.index_keys is not None:
                layer.lazy_initialization_indexer(own.index_keys)
                layer.indexer_keys = own.index_keys[:, :length]
        # A cache made without the model's config has none of these layers yet.
        cache.layers = empty.layers
        return cache

    def _attention_masks(self) -> dict[str, torch.Tensor]:
        masks = self.cache.attention_masks()
        if takes_booleans(implementation_of(self.model)):
            return masks
        return additive(masks, self.cache.dtype or self.model.dtype)
