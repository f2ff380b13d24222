"""The demo's numbers and the tables they are shown in."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from hf_specdec.metrics import SpeculationStats

PROMPT_WIDTH = 40


@dataclass(frozen=True)
class Run:
    """One measured generation: how many tokens in how many seconds."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall-clock time, the prompt's forward included."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class PromptResult:
    """A prompt's two runs.

    Attributes:
        stats: What the speculative run drafted and accepted.
        agreement: Whether the texts are equal, in a word or two with rich markup.
        reason: Why they are not, in a sentence; empty if they are.
        identical: The same as a fact, for counting; False under sampling.
    """

    prompt: str
    plain: Run
    speculative: Run
    stats: SpeculationStats
    agreement: str
    identical: bool
    reason: str = ""


def throughput_table(results: Sequence[PromptResult], compare_texts: bool = True) -> Table:
    """Draws one row per prompt and a totals row.

    Args:
        results: At least one prompt's runs.
        compare_texts: Whether equality of the texts means anything; not under sampling.
    """
    table = Table(title="With and without the drafter", show_footer=True)
    plain = _total([result.plain for result in results])
    speculative = _total([result.speculative for result in results])
    identical = sum(result.identical for result in results)
    stats = sum((result.stats for result in results), SpeculationStats())
    numbers = _numbers(plain, speculative, stats)
    table.add_column("prompt", footer="all")
    for header, footer in zip(
        ("tokens/s\nplain", "tokens/s\nspeculative", "speed-up", "mean acc.\nlength"),
        numbers,
        strict=True,
    ):
        table.add_column(header, footer=footer, justify="right", no_wrap=True)
    footer = f"{identical} of {len(results)}" if compare_texts else ""
    table.add_column("identical?", footer=footer, no_wrap=True)
    for result in results:
        numbers = _numbers(result.plain, result.speculative, result.stats)
        prompt = textwrap.shorten(result.prompt, PROMPT_WIDTH, placeholder=" ...")
        table.add_row(Text(prompt), *numbers, result.agreement)
    return table


def acceptance_table(results: Sequence[PromptResult]) -> Table:
    """Draws the acceptance rate of each draft position, over all prompts."""
    rates = sum((result.stats for result in results), SpeculationStats()).per_position
    table = Table(title="Acceptance by draft position")
    table.add_column("draft position")
    for position in range(1, len(rates) + 1):
        table.add_column(str(position), justify="right")
    table.add_row("drafts accepted this far", *(f"{rate:.0%}" for rate in rates))
    return table


def _total(runs: Sequence[Run]) -> Run:
    return Run(sum(run.num_tokens for run in runs), sum(run.seconds for run in runs))


def _numbers(plain: Run, speculative: Run, stats: SpeculationStats) -> tuple[str, ...]:
    speed_up = speculative.tokens_per_second / plain.tokens_per_second
    return (
        f"{plain.tokens_per_second:.1f}",
        f"{speculative.tokens_per_second:.1f}",
        f"{speed_up:.2f}x",
        f"{stats.mean_acceptance_length:.2f}",
    )
