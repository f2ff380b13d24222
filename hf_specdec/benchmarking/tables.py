"""A report as tables: for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from hf_specdec.benchmarking.results import Report, Row

_MEGABYTE = 1e6
_SPEED_COLUMNS = (
    "tok/s\nplain",
    "tok/s\nspec.",
    "speed-up\nmedian (range)",
    "mean acc.\nlength",
    "accepted\nper position",
    "identical/\nnear-tie/wrong",
)
_COST_COLUMNS = (
    "first token, ms\nplain / spec.",
    "share of time, %\ntarget / drafter / loop",
    "ms a step\ntarget / drafter / loop",
    "peak, MB\nplain / spec.",
)


def speed_table(rows: Sequence[Row]) -> Table:
    """How fast, and with what acceptance."""
    table = _table("Plain generate against speculation, paired", _SPEED_COLUMNS)
    for row in rows:
        table.add_row(
            escape(row.prompt_set),
            str(row.batch),
            str(row.k),
            f"{row.plain_tokens_per_second:.1f}",
            f"{row.speculative_tokens_per_second:.1f}",
            _speedup(row),
            f"{row.mean_acceptance_length:.2f}",
            " ".join(f"{rate:.2f}" for rate in row.per_position) or "-",
            _texts(row),
            style="red" if row.wrong else None,
        )
    return table


def cost_table(rows: Sequence[Row]) -> Table:
    """Where the time and the memory go."""
    table = _table(
        "Where a speculative call's time goes (profiled apart), and memory", _COST_COLUMNS
    )
    for row in rows:
        shares = (row.target_share, row.drafter_share, row.loop_share)
        steps = (row.target_step, row.drafter_step, row.loop_step)
        table.add_row(
            escape(row.prompt_set),
            str(row.batch),
            str(row.k),
            f"{1000 * row.plain_first_token:.1f} / {1000 * row.speculative_first_token:.1f}",
            " / ".join(f"{100 * share:.1f}" for share in shares),
            " / ".join(f"{step:.2f}" for step in steps),
            f"{_megabytes(row.plain_peak)} / {_megabytes(row.speculative_peak)}",
        )
    return table


def disagreement_lines(rows: Sequence[Row]) -> list[str]:
    """For each row whose texts part somewhere, where that is first: wrong ones before near-ties."""
    lines = []
    for row in rows:
        if not row.disagreements:
            continue
        first = min(row.disagreements, key=lambda d: (d.near_tie, d.prompt))
        judged = "a near-tie" if first.near_tie else "NOT a near-tie: an error"
        lines.append(
            f"{row.prompt_set}, batch {row.batch}, K={row.k}: {len(row.disagreements)} of "
            f"{row.texts} texts part; prompt {first.prompt} behind {first.position} equal tokens "
            f"(gap {first.gap:.3g}, rounding {first.rounding:.2g}, {judged})"
        )
    return lines


def environment_line(report: Report) -> str:
    """Models, machine, versions and settings, in a line."""
    known = {**report.environment, **report.settings}
    return ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in known.items())


def markdown(report: Report) -> str:
    """A table with a line for each set and batch size, and a cell for each K; texts are summed."""
    ks = sorted({row.k for row in report.rows})
    head = ["prompts", "batch", "plain", *(f"K = {k}" for k in ks), "mean acceptance length"]
    head.append("identical / near-tie / wrong")
    lines = [head, ["---"] * len(head)]
    for place in dict.fromkeys((row.prompt_set, row.batch) for row in report.rows):
        of_k = {row.k: row for row in report.rows if (row.prompt_set, row.batch) == place}
        rows = [of_k[k] for k in ks]
        name = rows[0].prompt_set.replace("|", "\\|")
        cells = [name, str(rows[0].batch), f"{rows[0].plain_tokens_per_second:.0f} tok/s"]
        cells += [f"{row.speculative_tokens_per_second:.0f} tok/s, {_speedup(row)}" for row in rows]
        cells.append(", ".join(f"{row.mean_acceptance_length:.2f}" for row in rows))
        counts = ((row.identical, row.near_ties, row.wrong) for row in rows)
        cells.append(" / ".join(str(sum(count)) for count in zip(*counts, strict=True)))
        lines.append(cells)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table}\n\n{environment_line(report)}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("prompts")
    for name in ("batch", "K", *columns):
        table.add_column(name, justify="right")
    return table


def _speedup(row: Row) -> str:
    return f"{row.speedup.median:.2f}x ({row.speedup.min:.2f}-{row.speedup.max:.2f})"


def _texts(row: Row) -> str:
    return f"{row.identical}/{row.near_ties}/{row.wrong}"


def _megabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / _MEGABYTE:.0f}"


def _short(value: Any) -> str:
    return " ".join(str(v) for v in value) if isinstance(value, list) else str(value)
