"""Paired runs: plain ``generate`` and the same call with a drafter, one after the other.

For every batch of prompts a plain run is followed by one speculative run for each K, again for
every repeat, every other time in turned order; so all of them see the same machine. Statistics,
time to first token and the parts of a call's time come from further calls, so that the timed ones
are undisturbed. All of it is greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hf_specdec.agreement import explain_difference
from hf_specdec.benchmarking.calls import Calls, Pair
from hf_specdec.benchmarking.clock import profile, timed
from hf_specdec.benchmarking.memory import PeakMemory
from hf_specdec.benchmarking.results import Disagreement, Row, RowRecord
from hf_specdec.benchmarking.synthetic import SyntheticDrafter, settle
from hf_specdec.benchmarking.workload import Group, Workload, groups_of
from hf_specdec.call import compatibility
from hf_specdec.drafters import Drafter
from hf_specdec.modeling.placement import input_device
from hf_specdec.modeling.quantized import num_ids
from hf_specdec.options.schedule import AUTO, MOST_AUTO, NumDraftTokens
from hf_specdec.options.tree_words import tree_wish
from hf_specdec.registry import drafter_for

WARM_UP_TOKENS = 8


def check(pair: Pair, workload: Workload) -> None:
    """Find out what can't work before anything runs.

    Raises:
        ValueError: a target that can't be sped up, a drafter that doesn't fit it, or a K or a tree
            that it can't draft.
    """
    compatibility.check_target(pair.target)
    if workload.acceptance is not None:
        return
    drafter = _drafter(pair)
    drafter.check(pair.target)
    for k in (k for k in workload.ks if k != AUTO):
        compatibility.check_num_draft_tokens(k, drafter, "--k")
    for num_nodes in filter(None, workload.tree_nodes):
        wish = tree_wish(None, num_nodes)
        assert wish is not None
        compatibility.check_tree(wish, drafter, pair.target)


def measure(
    pair: Pair, workload: Workload, advance: Callable[[str], None] = lambda where: None
) -> Iterator[Row]:
    """Measure every combination of set, batch size, K and tree.

    Args:
        pair: see `Pair`; `check` must accept it.
        workload: see `Workload`.
        advance: called after each of the `Workload.num_timed_groups`, with where that was.

    Yields:
        For each batch size and set the rows of all K.
    """
    runs = _PairedRuns(pair, workload)
    for batch in workload.batches:
        for name, prompts in workload.prompts.items():
            groups = groups_of(pair.tokenizer, prompts, batch, input_device(pair.target))
            records = [RowRecord(name, batch, *drafting) for drafting in workload.draftings]
            for number, group in enumerate(groups):
                runs.measure(group, number, records, partial(advance, f"{name}, batch {batch}"))
            yield from (record.finish() for record in records)


def default_draft_tokens(pair: Pair) -> int:
    """K where nobody asks for a number: the assistant's own wish, or what its checkpoint says."""
    own = getattr(pair.assistant, "generation_config", None)
    wish = getattr(own, "num_assistant_tokens", None)
    # transformers' default can't be told from a wish.
    return _drafter(pair).default_draft_tokens if wish in (None, 20) else wish


def _drafter(pair: Pair) -> Drafter:
    drafter = drafter_for(pair.assistant)
    if drafter is None:
        raise ValueError(f"{type(pair.assistant).__name__} is no drafter that hf_specdec knows")
    return drafter


class _PairedRuns:
    """The runs of one pair."""

    def __init__(self, pair: Pair, workload: Workload):
        self._pair = pair
        self._workload = workload
        self._calls = Calls(
            pair.target,
            workload.max_new_tokens,
            workload.schedule,
            workload.compiles,
            workload.lookup,
        )
        self._memory = PeakMemory(self._calls.device)

    def measure(
        self, group: Group, number: int, records: list[RowRecord], advance: Callable[[], None]
    ) -> None:
        """Everything about one batch of prompts.

        Args:
            group: the prompts.
            number: of the group in its set.
            records: of each K, filled.
            advance: called after each repeat.
        """
        calls = self._calls
        calls.plain(group, WARM_UP_TOKENS)
        drafters = [self._assistant(group, number, record.k) for record in records]
        # Also the warm-up of the timed runs.
        for record, drafter in zip(records, drafters, strict=True):
            self._tell(group, record, drafter)
        for repeat in range(self._workload.repeats):
            turned = repeat % 2 == 1
            reference, texts = self._timed_round(group, records, drafters, turned)
            if repeat == 0:
                for record, text in zip(records, texts, strict=True):
                    self._compare(group, record, reference, text)
            self._first_tokens(group, records, drafters)
            advance()
        for record, drafter in zip(records, drafters, strict=True):
            self._profile(group, record, drafter)

    def _assistant(self, group: Group, number: int, k: NumDraftTokens) -> Any:
        """What to draft with: the pair's own, or a synthetic drafter that knows these texts."""
        workload, calls = self._workload, self._calls
        if workload.acceptance is None:
            return self._pair.assistant
        drafter = SyntheticDrafter(
            calls.new_tokens(calls.plain(group), group),
            workload.max_new_tokens,
            num_ids(self._pair.target.get_input_embeddings()),
            workload.acceptance,
            max_draft_tokens=MOST_AUTO if k == AUTO else k,
            # Other coins for other prompts.
            seed=workload.seed + number,
            seconds_per_token=workload.draft_seconds,
        )
        settle(drafter, lambda: calls.new_tokens(calls.speculative(group, drafter, k), group))
        return drafter

    def _tell(self, group: Group, record: RowRecord, drafter: Any) -> None:
        """Take statistics."""
        output = self._calls.speculative(
            group,
            drafter,
            record.k,
            tree_nodes=record.tree_nodes,
            return_dict_in_generate=True,
        )
        record.stats = record.stats + output.speculation

    def _timed_round(
        self,
        group: Group,
        records: list[RowRecord],
        drafters: list[Any],
        turned: bool,
    ) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Plain, then each K, or the other way round; returns their texts."""
        calls = self._calls
        runs: list[Callable[[], Any]] = [partial(calls.plain, group)]
        for record, drafter in zip(records, drafters, strict=True):
            runs.append(
                partial(calls.speculative, group, drafter, record.k, tree_nodes=record.tree_nodes)
            )
        results: list[Any] = [None] * len(runs)
        order = range(len(runs))
        for index in reversed(order) if turned else order:
            results[index] = self._memory.of(partial(timed, runs[index], calls.device))
        texts = [calls.new_tokens(sequences, group) for _, (_, sequences) in results]
        # Each run's own: with K chosen on the way, or near-ties, they may differ.
        counts = [sum(len(row) for row in text) for text in texts]
        plain_peak, (plain_seconds, _) = results[0]
        for record, count, (peak, (seconds, _)) in zip(
            records, counts[1:], results[1:], strict=True
        ):
            record.plain_seconds.append(plain_seconds / counts[0])
            record.speculative_seconds.append(seconds / count)
            record.plain_peaks.append(plain_peak)
            record.speculative_peaks.append(peak)
        return texts[0], texts[1:]

    def _first_tokens(self, group: Group, records: list[RowRecord], drafters: list[Any]) -> None:
        """Time calls for one token."""
        calls = self._calls
        plain, _ = timed(partial(calls.plain, group, 1), calls.device)
        for record, drafter in zip(records, drafters, strict=True):
            call = partial(
                calls.speculative, group, drafter, record.k, 1, tree_nodes=record.tree_nodes
            )
            ours, _ = timed(call, calls.device)
            record.plain_first.append(plain)
            record.speculative_first.append(ours)

    def _compare(
        self, group: Group, record: RowRecord, reference: list[list[int]], texts: list[list[int]]
    ) -> None:
        """Judge every row whose text is not the plain one."""
        for row, (plain, ours) in enumerate(zip(reference, texts, strict=True)):
            record.texts += 1
            difference = explain_difference(self._pair.target, group.prompt(row), plain, ours)
            if difference is not None:
                record.disagreements.append(Disagreement.of(group.numbers[row], difference))

    def _profile(self, group: Group, record: RowRecord, assistant: Any) -> None:
        """Where a speculative call's time goes."""
        drafter = drafter_for(assistant)
        assert drafter is not None
        calls = self._calls
        call = partial(calls.speculative, group, drafter, record.k, tree_nodes=record.tree_nodes)
        record.sections += profile(calls.target, drafter, call)
