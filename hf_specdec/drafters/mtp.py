"""Drafting with a target's own multi-token-prediction modules.

A module attends to its own earlier entries, so it has a cache. Entry i of the first module pairs
the target's state at position i with the token at i + 1, and predicts the token at i + 2; entry i
of module j pairs the output of module j - 1 with the token at i + 1 + j. One *cycle* runs every
module once over a span of entries and drafts one token with each. The span of the first cycle of a
proposal is all that the target has verified since the last one (the whole prompt at first), with
the target's states. If more tokens are wanted than there are modules, the outputs at the span's end
stand for the states of the tokens just drafted, and another cycle runs over those.

What drafting wrote, and entries of rejected tokens, is overwritten. The newest entries of later
modules were made with drafted tokens: as many as there are later modules are run again with the
next span (its *tail*), now with the tokens that were verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from transformers import Cache, PreTrainedModel

from hf_specdec.caches.ragged_cache import RaggedCache
from hf_specdec.drafters.base import Drafter, Feed, PickToken, VerifiedStep
from hf_specdec.modeling.largest import index_of_largest
from hf_specdec.options.config import Method
from hf_specdec.targets.attention import additive
from hf_specdec.targets.prompt import Prompt

# Entries of a prompt per pass: the mask of a pass has this many rows.
_CHUNK = 512
# More than anybody drafts; MTP modules can go on for as long as wished.
_MOST = 64


class MTPNetwork(Protocol):
    """What a family's MTP modules must offer; see `MTPModel`."""

    @property
    def config(self) -> Any:
        """With the target's sizes."""

    @property
    def n_predict(self) -> int:
        """Tokens a step drafts by default."""

    @property
    def num_modules(self) -> int:
        """Modules that are run in turn."""

    @property
    def feed(self) -> Any:
        """``"pre_norm"`` or ``"post_norm"``."""

    @property
    def token_shift(self) -> int:
        """Entry i is paired with the token at i + this; 1 is right."""

    @property
    def layer_types(self) -> Sequence[str]:
        """The kind of attention of each decoder layer, in the order of the cache."""

    @property
    def layer_windows(self) -> Sequence[int | None]:
        """The window of each decoder layer, ``None`` without one."""

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """Ids of the columns of `logits`, int64 ``[V']``; ``None`` means 0 .. V - 1."""

    def follow_target(self) -> None:
        """Be where the target is by now, in its dtype."""

    def embed(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """``[B, N, d]``."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        masks: Mapping[str, torch.Tensor] | None = None,
        cache: Cache | None = None,
        module: int = 0,
    ) -> torch.Tensor:
        """``[B, N, d]``."""

    def logits(self, states: torch.Tensor, module: int = 0) -> torch.Tensor:
        """``[.., V']``."""


@dataclass
class _Span:
    """Consecutive entries of every row.

    Attributes:
        hidden: ``[n, N, d]``, the states at the entries.
        ids: int64 ``[n, N + 1 + modules]``, the tokens at the entries and those that follow, as far
            as they are known.
        last: int64 ``[n]``, index of each row's last entry; what stands behind it doesn't count.
        host_last: the same on the host.
    """

    hidden: torch.Tensor
    ids: torch.Tensor
    last: torch.Tensor
    host_last: Sequence[int]

    def tail(self, size: int) -> _Span:
        """The last ``size`` entries, without the tokens that follow."""
        last = torch.full_like(self.last, size - 1)
        if size == 0:
            # One module, as in most families: nothing is ever run again.
            return _Span(self.hidden[:, :0], self.ids[:, :0], last, [-1] * len(self.host_last))
        index = (self.last - size + 1)[:, None] + torch.arange(size, device=last.device)
        hidden = self.hidden.gather(1, index[..., None].expand(-1, -1, self.hidden.shape[-1]))
        return _Span(hidden, self.ids.gather(1, index), last, [size - 1] * len(self.host_last))

    def rows(self, order: Sequence[int]) -> _Span:
        """Row i becomes the present row ``order[i]``."""
        index = torch.tensor(order, device=self.last.device)
        host_last = [self.host_last[i] for i in order]
        return _Span(self.hidden[index], self.ids[index], self.last[index], host_last)


class MTPDrafter(Drafter):
    """Drafts with the modules of an `MTPNetwork`.

    Args:
        network: made of the target itself.
    """

    method: ClassVar[Method | None] = "mtp"
    reads_prompt: ClassVar[bool] = True
    runs_target_modules: ClassVar[bool] = True

    def __init__(self, network: MTPNetwork):
        self.network = network
        self._modules = network.num_modules
        self._cache: RaggedCache | None = None
        self._prompt: Prompt | None = None
        self._step: VerifiedStep | None = None
        self._tail: _Span | None = None

    @property
    def feed(self) -> Feed:
        """Which state of the target it reads."""
        return self.network.feed

    @property
    def max_draft_tokens(self) -> int:
        """No limit of the modules' own."""
        return _MOST

    @property
    def default_draft_tokens(self) -> int:
        """One token for each module."""
        return self.network.n_predict

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless the network was made of this target."""
        if getattr(self.network, "target", target) is not target:
            raise ValueError(
                "assistant_model holds the MTP layers of another model object; MTP layers share "
                "the embedding and head of the target they were made of"
            )

    def start(
        self,
        target: PreTrainedModel,
        prompt: Prompt | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """See `Drafter.start`."""
        self.network.follow_target()
        self._first_proposal = True
        self._cache, self._step, self._prompt, self._tail = None, None, prompt, None
        # Modules that no proposal of this call reaches aren't run.
        self._modules = min(self.network.num_modules, max(num_draft_tokens or _MOST, 1))

    def observe(self, step: VerifiedStep) -> None:
        """Keep a step until the token behind it is known."""
        if self._step is not None:
            # Nothing was drafted behind the last step; its entries are still needed.
            self._first_cycle(step.input_ids[:, 0], 0, None, [])
        if self._cache is None:
            self._cache = self._new_cache(step)
        self._step = step

    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """See `Drafter.propose`."""
        drafts: list[torch.Tensor] = []
        states = self._first_cycle(token_ids, num_draft_tokens, pick, drafts)
        assert self._tail is not None
        tail, newest, written = self._tail, token_ids, 0
        while len(drafts) < num_draft_tokens and not (pick is not None and pick.done):
            # The last cycle's outputs take the place of the target's states.
            entries = torch.stack([newest, *drafts[written:]], dim=1)
            count = entries.shape[1] - 1
            last = tail.last + count
            span = _Span(
                torch.cat([tail.hidden, torch.stack(states, dim=1)], dim=1),
                self._room(torch.cat([tail.ids, entries], dim=1)),
                last,
                [n + count for n in tail.host_last],
            )
            newest, written = drafts[-1], written + count
            states = self._cycle(span, num_draft_tokens, pick, drafts)
            self._advance(count)
            tail = span.tail(tail.hidden.shape[1])
        self._advance(-written)
        return torch.stack(drafts, dim=1)

    def keep_rows(self, order: Sequence[int]) -> None:
        """See `Drafter.keep_rows`."""
        assert self._cache is not None
        self._cache.keep_rows(order)
        if self._tail is not None:
            self._tail = self._tail.rows(order)
        if self._step is not None:
            index = torch.tensor(order, device=self._step.input_ids.device)
            self._step = VerifiedStep(
                self._step.input_ids[index],
                self._step.hidden_states[index],
                self._step.num_accepted[index],
                [self._step.host_num_accepted[i] for i in order],
            )

    def finish(self) -> None:
        """Let go of the modules' keys and of the prompt."""
        self._cache, self._step, self._prompt, self._tail = None, None, None, None

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
            self.network.layer_windows,
            self.network.layer_types,
            padding,
            max_query_length=_CHUNK + _MOST,
            num_slots=length + _CHUNK,
            offsets=offsets,
            hidden=hidden,
        )

    def _first_cycle(
        self,
        token_ids: torch.Tensor,
        num_draft_tokens: int,
        pick: PickToken | None,
        drafts: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run the verified tokens, behind whose last ``token_ids`` ``[n]`` stand; see `_cycle`."""
        assert self._step is not None and self._cache is not None, "observe() comes first"
        step, self._step = self._step, None
        hidden, ids, last = step.hidden_states, step.input_ids, step.num_accepted
        host_last = list(step.host_num_accepted)
        if self._tail is not None and (size := self._tail.hidden.shape[1]):
            hidden = torch.cat([self._tail.hidden.to(hidden), hidden], dim=1)
            ids = torch.cat([self._tail.ids, ids], dim=1)
            last, host_last = last + size, [n + size for n in host_last]
        ids = self._room(torch.nn.functional.pad(ids, (0, 1)))
        ids = ids.scatter(1, last[:, None] + 1, token_ids[:, None])
        span = _Span(hidden, ids, last, host_last)
        if self._tail is None:
            span = self._run_chunks(span)
        states = self._cycle(span, num_draft_tokens, pick, drafts)
        size = min(self._modules - 1, min(span.host_last) + 1)
        self._tail = span.tail(size)
        self._cache.advance(span.last + 1 - size, [n + 1 - size for n in span.host_last])
        return states

    def _run_chunks(self, span: _Span) -> _Span:
        """Run a long prompt but for its end, which is returned."""
        length, start = span.hidden.shape[1], 0
        while length - start > _CHUNK:
            # Later modules read a few tokens beyond their entries.
            hidden = span.hidden[:, start : start + _CHUNK]
            ids = span.ids[:, start : start + _CHUNK + 1 + self._modules]
            self._cycle(_Span(hidden, ids, span.last, span.host_last), 0, None, [])
            self._advance(_CHUNK)
            start += _CHUNK
        if start == 0:
            return span
        # Its beginning belongs to the tail as well.
        keep = min(self._modules - 1, start)
        self._advance(-keep)
        start -= keep
        host_last = [n - start for n in span.host_last]
        return _Span(span.hidden[:, start:], span.ids[:, start:], span.last - start, host_last)

    def _cycle(
        self,
        span: _Span,
        num_draft_tokens: int,
        pick: PickToken | None,
        drafts: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run every module over a span, and append what they draft; the cache doesn't advance.

        Returns:
            The output ``[n, d]`` of each module that drafted, at the span's last entry.
        """
        assert self._cache is not None
        hidden, ids = span.hidden, span.ids
        length = hidden.shape[1]
        position_ids = self._cache.begin(length)
        row = torch.arange(hidden.shape[0], device=span.last.device)
        table = self.network.draft_token_ids
        masks: dict[str, torch.Tensor] | None = None
        states = []
        for module in range(self._modules):
            first = module + self.network.token_shift
            embeds = self.network.embed(ids[:, first : first + length], position_ids)
            if masks is None:
                masks = self._masks(embeds.dtype)
            hidden = self.network(hidden, embeds, position_ids, masks, self._cache, module)
            # MiMo's layer is a part of the target, and may be on another device than the head.
            hidden = hidden.to(position_ids.device)
            if len(drafts) >= num_draft_tokens or (pick is not None and pick.done):
                continue
            state = hidden[row, span.last]
            logits = self.network.logits(state, module)
            column = index_of_largest(logits) if pick is None else pick(len(drafts), logits, table)
            draft = column if table is None else table[column]
            states.append(state)
            drafts.append(draft)
            ids = ids.scatter(1, span.last[:, None] + 2 + module, draft[:, None])
        return states

    def _masks(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        assert self._cache is not None
        return additive(self._cache.attention_masks(), dtype)

    def _room(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids with a place for every token that a cycle drafts."""
        return torch.nn.functional.pad(ids, (0, self._modules))

    def _advance(self, count: int) -> None:
        assert self._cache is not None
        rows = self._cache.num_rows
        self._cache.advance(self._cache.lengths.new_full((rows,), count), [count] * rows)
