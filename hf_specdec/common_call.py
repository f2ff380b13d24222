"""One call of ``generate`` made by several ranks that run the same rows (see `ranks`).

Before the first forward they compare what they were asked for, and take the first rank's random
seeds and what it remembers of earlier calls. Then all take the first rank's drafts in every step,
and its verdict on them. What follows from those are sums of integers, the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.auto_length import AutoDraftLength
from hf_specdec.call.decoding_settings import DecodingSettings
from hf_specdec.drafters.base import Drafter, Feed, NodeLogits, PickToken, VerifiedStep
from hf_specdec.ranks import Ranks, whole_ends
from hf_specdec.targets.prompt import Prompt
from hf_specdec.tree import TokenTree, TreeShape
from hf_specdec.tree_shape import MeasuredTree
from hf_specdec.verification import Verdict


def settle_call(
    ranks: Ranks, settings: DecodingSettings, prompt: Prompt, target: Any, given: Cache | None
) -> DecodingSettings:
    """Make sure that all ranks were asked for the same, and take what the first one knows.

    Args:
        ranks: of the call.
        settings: of this rank.
        prompt: of this rank.
        target: the model.
        given: a cache that holds the beginning of the prompt.

    Returns:
        The settings to decode by; ``settings`` itself where a rank has its rows to itself.

    Raises:
        ValueError: on every rank, if their calls differ.
    """
    settings = replace(settings, ranks=ranks)
    if ranks.in_step and settings.prefill_chunk_size is not None:
        # The forwards over the prompt are as many as it has chunks.
        num_tokens = prompt.num_slots - (given.get_seq_length() if given is not None else 0)
        ranks.level(-(-num_tokens // settings.prefill_chunk_size), target)
    if ranks.same_rows is None:
        return settings
    _compare(ranks.gather(_asked_for(settings, prompt)))
    length, tree = settings.draft_length, settings.tree
    if isinstance(length, AutoDraftLength):
        # Measured with a clock, of which every rank has its own.
        length.agree = ranks.number_of_first
    else:
        length.current = ranks.number_of_first(length.current)
    if isinstance(tree, MeasuredTree):
        tree.rates.copy_counts(ranks.object_of_first(tree.rates.counts()))
    return replace(settings, row_seeds=ranks.of_first(settings.row_seeds))


def settle_verdict(ranks: Ranks, verdict: Verdict) -> Verdict:
    """The first rank's verdict on drafts that all have; ``verdict`` where a rank is on its own."""
    if ranks.same_rows is None:
        return verdict
    both = torch.cat([verdict.tokens, verdict.num_accepted[:, None]], dim=1)
    both = ranks.of_first(both)
    return Verdict(both[:, :-1], both[:, -1])


def _asked_for(settings: DecodingSettings, prompt: Prompt) -> dict[str, Any]:
    """What a call is about, as far as all its ranks must be asked for the same."""
    length, tree = settings.draft_length, settings.tree
    eos = settings.eos_token_ids
    return {
        "shape of input_ids": tuple(prompt.input_ids.shape),
        "sum of input_ids": int(prompt.input_ids.sum()),
        "padding (attention_mask)": prompt.padding.tolist(),
        "max_length": settings.max_length,
        "eos_token_id": None if eos is None else eos.tolist(),
        "do_sample": settings.do_sample,
        "verification='rejection'": settings.rejection,
        "num_assistant_tokens": (length.schedule, length.limit),
        "num_speculative_tokens_per_batch_size": length.per_batch_size,
        "assistant_confidence_threshold": settings.confidence_threshold,
        "prompt_lookup_num_tokens": None if settings.lookup is None else vars(settings.lookup),
        "num_tree_nodes": None if tree is None else tree.num_nodes,
        "prefill_chunk_size": settings.prefill_chunk_size,
    }


def _compare(asked: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless all ranks were asked for the same."""
    for name, value in asked[0].items():
        for rank, other in enumerate(asked):
            if other[name] != value:
                raise ValueError(
                    f"the ranks of a tensor-parallel target make one call together, but {name} is "
                    f"{value!r} on the first of them and {other[name]!r} on number {rank}. Call "
                    "generate() with the same arguments on every rank; to share prompts among "
                    "processes, load the whole target in each of them, without a tp_plan"
                )


def common_drafter(drafter: Drafter, settings: DecodingSettings) -> Drafter:
    """The drafter of a call: itself where a rank has its rows to itself."""
    if settings.ranks.same_rows is None:
        return drafter
    return CommonDrafter(drafter, settings.ranks, settings.confidence_threshold > 0)


def call_context(ranks: Ranks, drafter: Drafter, target: Any) -> AbstractContextManager[None]:
    """What the ranks of a call hold for as long as it runs.

    Args:
        ranks: of the call.
        drafter: of the call.
        target: the model.
    """
    if ranks.in_step and drafter.runs_target_modules:
        return whole_ends(target)
    return nullcontext()


class CommonDrafter(Drafter):
    """Every rank drafts, with its own copy of the drafter, and takes the first rank's drafts.

    Args:
        drafter: the copy.
        ranks: of the call.
        stops_early: whether drafting may end before it has all its tokens.
    """

    def __init__(self, drafter: Drafter, ranks: Ranks, stops_early: bool):
        self._drafter = drafter
        self._ranks = ranks
        self._stops_early = stops_early

    @property
    def source(self) -> Drafter:
        """See `Drafter.source`."""
        return self._drafter.source

    @property
    def feed(self) -> Feed:
        """See `Drafter.feed`."""
        return self._drafter.feed

    @property
    def reads_prompt(self) -> bool:  # type: ignore[override]
        """See `Drafter.reads_prompt`."""
        return self._drafter.reads_prompt

    @property
    def runs_target_modules(self) -> bool:  # type: ignore[override]
        """See `Drafter.runs_target_modules`."""
        return self._drafter.runs_target_modules

    @property
    def max_draft_tokens(self) -> int:
        """See `Drafter.max_draft_tokens`."""
        return self._drafter.max_draft_tokens

    def check(self, target: PreTrainedModel) -> None:
        """See `Drafter.check`."""
        self._drafter.check(target)

    def start(
        self,
        target: PreTrainedModel,
        prompt: Prompt | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """See `Drafter.start`."""
        self._drafter.start(target, prompt, num_draft_tokens)

    def share_cache(self, cache: Cache) -> None:
        """See `Drafter.share_cache`."""
        self._drafter.share_cache(cache)

    def observe(self, step: VerifiedStep) -> None:
        """See `Drafter.observe`."""
        self._drafter.observe(step)

    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """See `Drafter.propose`."""
        if pick is not None and self._stops_early:
            pick = _CommonPick(pick, self._ranks)
        return self._ranks.of_first(self._drafter.propose(token_ids, num_draft_tokens, pick))

    def propose_tree(
        self, token_ids: torch.Tensor, depth: int, shape: TreeShape | None, node_logits: NodeLogits
    ) -> tuple[torch.Tensor, TokenTree]:
        """See `Drafter.propose_tree`."""
        drafts, tree = self._drafter.propose_tree(token_ids, depth, shape, node_logits)
        if shape is not None:
            return self._ranks.of_first(drafts), tree
        # Its structure follows from the drafts.
        parts = (drafts, tree.parents, tree.depths, tree.ancestors, tree.paths)
        drafts, *structure = self._ranks.object_of_first([part.cpu() for part in parts])
        device = token_ids.device
        return drafts.to(device), TokenTree(tree.depth, *(part.to(device) for part in structure))

    def keep_rows(self, order: Sequence[int]) -> None:
        """See `Drafter.keep_rows`."""
        self._drafter.keep_rows(order)

    def finish(self) -> None:
        """See `Drafter.finish`."""
        self._drafter.finish()


class _CommonPick:
    """A `PickToken` that is done where the first rank's is."""

    def __init__(self, pick: PickToken, ranks: Ranks):
        self._pick = pick
        self._ranks = ranks
        self.done = False

    def __call__(
        self, k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """See `PickToken`."""
        index = self._pick(k, logits, token_ids)
        self.done = bool(self._ranks.number_of_first(int(self._pick.done)))
        return index
