"""Drafting with a target's own multi-token-prediction layers.

An MTP layer attends to its own earlier entries, so it has a cache. Entry i pairs the target's state
at position i with the token at position i + 1, and predicts the token at i + 2. The first pass of a
proposal runs every token that the target has verified since the last one (the whole prompt at
first), with the target's states; entries that drafting wrote, and those of rejected tokens, are
overwritten. Every further pass appends one entry whose state is the layer's own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from transformers import Cache, PreTrainedModel

from hf_specdec.cache import RaggedCache
from hf_specdec.drafters.base import Drafter, Feed, PickToken, VerifiedStep
from hf_specdec.prompt import Prompt

# Tokens of a prompt per pass: the mask of a pass has this many rows.
_CHUNK = 512
# More than anybody drafts; MTP layers can go on for as long as wished.
_MOST = 64


class MTPNetwork(Protocol):
    """What a family's MTP layers must offer; see `MiMoMTP`."""

    @property
    def config(self) -> Any:
        """Of the target."""

    @property
    def n_predict(self) -> int:
        """MTP layers."""

    @property
    def feed(self) -> Any:
        """``"pre_norm"`` or ``"post_norm"``."""

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """Ids of the columns of `logits`, int64 ``[V']``; ``None`` means 0 .. V - 1."""

    def embed(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """``[B, N, d]``."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """``[B, N, d]``."""

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[.., V']``."""


class MTPDrafter(Drafter):
    """Drafts with the layers of an `MTPNetwork`.

    Args:
        network: made of the target itself.
    """

    reads_prompt: ClassVar[bool] = True

    def __init__(self, network: MTPNetwork):
        self.network = network
        self._cache: RaggedCache | None = None
        self._prompt: Prompt | None = None
        self._step: VerifiedStep | None = None

    @property
    def feed(self) -> Feed:
        """Which state of the target it reads."""
        return self.network.feed

    @property
    def max_draft_tokens(self) -> int:
        """No limit of the layers' own."""
        return _MOST

    @property
    def default_draft_tokens(self) -> int:
        """One token for each layer."""
        return self.network.n_predict

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless the network was made of this target."""
        if getattr(self.network, "target", target) is not target:
            raise ValueError(
                "assistant_model holds the MTP layers of another model object; MTP layers share "
                "the embedding and head of the target they were made of"
            )

    def start(self, target: PreTrainedModel, prompt: Prompt | None = None) -> None:
        """See `Drafter.start`."""
        self._first_proposal = True
        self._cache, self._step, self._prompt = None, None, prompt

    def observe(self, step: VerifiedStep) -> None:
        """Keep a step until the token behind it is known."""
        if self._step is not None:
            # Nothing was drafted behind the last step; its entries are still needed.
            self._run_step(step.input_ids[:, 0])
        if self._cache is None:
            self._cache = self._new_cache(step)
        self._step = step

    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """See `Drafter.propose`."""
        assert self._cache is not None, "observe() comes before propose()"
        state = self._run_step(token_ids)
        drafts: list[torch.Tensor] = []
        ids = self.network.draft_token_ids
        for k in range(num_draft_tokens):
            if k:
                # The layer's own output takes the place of the target's state.
                state = self._run(state[:, None], drafts[-1][:, None])[:, 0]
                self._advance(1)
            logits = self.network.logits(state)
            # max: see `verification.choose_tokens`.
            index = logits.max(dim=-1).indices if pick is None else pick(k, logits, ids)
            drafts.append(index if ids is None else ids[index])
            if pick is not None and pick.done:
                break
        self._advance(1 - len(drafts))
        return torch.stack(drafts, dim=1)

    def keep_rows(self, order: Sequence[int]) -> None:
        """See `Drafter.keep_rows`."""
        assert self._cache is not None
        self._cache.keep_rows(order)
        if self._step is not None:
            index = torch.tensor(order, device=self._step.input_ids.device)
            self._step = VerifiedStep(
                self._step.input_ids[index],
                self._step.hidden_states[index],
                self._step.num_accepted[index],
                [self._step.host_num_accepted[i] for i in order],
            )

    def _new_cache(self, step: VerifiedStep) -> RaggedCache:
        """A cache for the prompt that the first step brings, from the first slot it has run."""
        rows, length = step.input_ids.shape
        zeros = step.num_accepted.new_zeros(rows)
        padding = offsets = zeros
        hidden = None
        if self._prompt is not None:
            # Of a prompt continued from a given cache the beginning is not there.
            before = self._prompt.num_slots - length
            padding = (self._prompt.padding - before).clamp(min=0)
            offsets = self._prompt.offsets - before
            if self._prompt.hidden is not None:
                hidden = self._prompt.hidden[:, before:]
        return RaggedCache(
            [None],
            ["full_attention"],
            padding,
            max_query_length=_MOST + 1,
            num_slots=length + _CHUNK,
            offsets=offsets,
            hidden=hidden,
        )

    def _run_step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The first pass: the verified tokens, of which ``token_ids`` ``[n]`` follows the last.

        Returns:
            ``[n, d]``, the output at the last verified token.
        """
        assert self._step is not None and self._cache is not None
        step, self._step = self._step, None
        following = torch.nn.functional.pad(step.input_ids[:, 1:], (0, 1))
        following = following.scatter(1, step.num_accepted[:, None], token_ids[:, None])
        length = following.shape[1]
        for start in range(0, length, _CHUNK):
            stop = min(start + _CHUNK, length)
            output = self._run(step.hidden_states[:, start:stop], following[:, start:stop])
            if stop < length:
                self._advance(stop - start)
        num_tokens = step.num_accepted + 1 - start
        self._cache.advance(num_tokens, [n + 1 - start for n in step.host_num_accepted])
        row = torch.arange(output.shape[0], device=output.device)
        return output[row, num_tokens - 1]

    def _run(self, hidden_states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """One pass over ``[n, N]`` tokens; they don't count before the cache advances."""
        assert self._cache is not None
        position_ids = self._cache.begin(token_ids.shape[1])
        embeds = self.network.embed(token_ids, position_ids)
        visible = self._cache.attention_masks()["full_attention"]
        mask = torch.zeros_like(visible, dtype=embeds.dtype)
        mask.masked_fill_(~visible, torch.finfo(embeds.dtype).min)
        return self.network(hidden_states, embeds, position_ids, mask, self._cache)

    def _advance(self, count: int) -> None:
        assert self._cache is not None
        rows = self._cache.num_rows
        self._cache.advance(self._cache.lengths.new_full((rows,), count), [count] * rows)
