"""Several ways to generate the same text, measured in turns on the same prompts."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.agreement import explain_difference
from hf_specdec.benchmarking import Spread

PLAIN = "plain generate"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Way:
    """One way to generate.

    Attributes:
        name: in the table.
        whose: ``"transformers"`` or ``"hf_specdec"``.
        run: called with ``max_new_tokens=`` and the prompt's tensors; returns ids ``[1, L]``.
        rival: name of the way of ours it is compared with, if it is one of transformers'.
    """

    name: str
    whose: str
    run: Callable[..., Any]
    rival: str | None = None


@dataclass
class Measured:
    """What was found about one way.

    Attributes:
        seconds: per new token, for each prompt and repeat.
        forwards: of the target in the first repeat, that of the prompt included.
        tokens: new ones in the first repeat.
        identical, near_ties, wrong: texts beside plain ``generate``'s (see `hf_specdec.agreement`).
    """

    way: Way
    seconds: list[float] = field(default_factory=list)
    forwards: int = 0
    tokens: int = 0
    identical: int = 0
    near_ties: int = 0
    wrong: int = 0

    def ratio_to(self, other: "Measured") -> Spread:
        """How many times as fast as ``other``, over the pairs of runs."""
        pairs = zip(other.seconds, self.seconds, strict=True)
        return Spread.of([theirs / own for theirs, own in pairs])


def measure(target, ways, prompts, max_new_tokens, repeats, advance=lambda: None):
    """Run every way on every prompt, one after the other, every other time in turned order.

    Args:
        target: the model, whose forwards are counted.
        ways: `Way`s; the first is plain ``generate``.
        prompts: dicts of ``input_ids`` and ``attention_mask`` of one row.
        max_new_tokens: of each text.
        repeats: for each prompt.
        advance: called after each prompt and repeat.

    Returns:
        A `Measured` for each way, in their order.
    """
    results = [Measured(way) for way in ways]
    count = 0

    def counted(*_):
        nonlocal count
        count += 1

    for way in ways:
        way.run(**prompts[0], max_new_tokens=WARM_UP_TOKENS)
    handle = target.register_forward_pre_hook(counted)
    try:
        for repeat in range(repeats):
            for number, prompt in enumerate(prompts):
                texts = {}
                turned = (repeat + number) % 2 == 1
                for result in reversed(results) if turned else results:
                    count = 0
                    start = time.perf_counter()
                    ids = result.way.run(**prompt, max_new_tokens=max_new_tokens)
                    seconds = time.perf_counter() - start
                    text = ids[0, prompt["input_ids"].shape[1] :].tolist()
                    texts[result.way.name] = text
                    result.seconds.append(seconds / len(text))
                    if repeat == 0:
                        result.forwards += count
                        result.tokens += len(text)
                if repeat == 0:
                    _compare(target, prompt, results, texts)
                advance()
    finally:
        handle.remove()
    return results


def _compare(target, prompt, results, texts):
    """Judge each text against the first way's."""
    plain = texts[results[0].way.name]
    for result in results:
        found = explain_difference(target, prompt["input_ids"], plain, texts[result.way.name])
        if found is None:
            result.identical += 1
        elif found.near_tie:
            result.near_ties += 1
        else:
            result.wrong += 1


def rows_of(section, results):
    """A dict of plain numbers for each way."""
    by_name = {result.way.name: result for result in results}
    rows = []
    for result in results:
        way = result.way
        speedup = result.ratio_to(results[0])
        row = {
            "section": section,
            "way": way.name,
            "whose": way.whose,
            "tokens_per_second": 1 / statistics.median(result.seconds),
            "to_plain": [speedup.median, speedup.min, speedup.max],
            "tokens_per_forward": result.tokens / result.forwards,
            "rival": way.rival,
            "ours_ahead": None,
            "identical": result.identical,
            "near_ties": result.near_ties,
            "wrong": result.wrong,
        }
        if way.rival is not None:
            ahead = by_name[way.rival].ratio_to(result)
            row["ours_ahead"] = [ahead.median, ahead.min, ahead.max]
        rows.append(row)
    return rows
