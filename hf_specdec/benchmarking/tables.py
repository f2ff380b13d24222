"""A report as tables: for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hf_specdec.benchmarking.results import Report, Row, in_order

_MEGABYTE = 1e6


def tables(rows: Sequence[Row]) -> list[Table]:
    """Everything about the rows, in tables that fit a terminal of 80 columns."""
    return [speed_table(rows), acceptance_table(rows), cost_table(rows)]


def speed_table(rows: Sequence[Row]) -> Table:
    """How fast, and whether the texts agree."""
    columns = (
        "tok/s\nplain",
        "tok/s\nspec.",
        "speed-\nup",
        "\nrange",
        "mean acc.\nlength",
        "identical/\ntie/wrong",
    )
    return _table(
        "Plain generate against speculation, paired",
        columns,
        rows,
        lambda row: (
            f"{row.plain_tokens_per_second:.1f}",
            f"{row.speculative_tokens_per_second:.1f}",
            f"{row.speedup.median:.2f}x",
            f"{row.speedup.min:.2f}-{row.speedup.max:.2f}",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.identical}/{row.near_ties}/{row.wrong}",
        ),
    )


def acceptance_table(rows: Sequence[Row]) -> Table:
    """How many drafts are accepted."""
    return _table(
        "Acceptance",
        ("drafts", "rate", "accepted this far, by draft position"),
        rows,
        lambda row: (
            str(row.num_drafts),
            f"{row.acceptance_rate:.2f}",
            " ".join(f"{rate:.2f}" for rate in row.per_position) or "-",
        ),
    )


def cost_table(rows: Sequence[Row]) -> Table:
    """Where the time and the memory go."""
    columns = (
        "first token\nms, p./s.",
        "target/drafter/\nloop, %",
        "target/drafter/\nloop, ms a step",
        "peak, MB\np./s.",
    )
    return _table(
        "Costs, plain/speculative; parts of a speculative call, profiled apart",
        columns,
        rows,
        lambda row: (
            f"{1000 * row.plain_first_token:.3g}/{1000 * row.speculative_first_token:.3g}",
            "/".join(
                f"{100 * share:.1f}"
                for share in (row.target_share, row.drafter_share, row.loop_share)
            ),
            "/".join(f"{step:.2f}" for step in (row.target_step, row.drafter_step, row.loop_step)),
            f"{_megabytes(row.plain_peak)}/{_megabytes(row.speculative_peak)}",
        ),
    )


def disagreement_lines(rows: Sequence[Row]) -> list[str]:
    """For each row whose texts part somewhere, where that is first: wrong ones before near-ties."""
    lines = []
    for row in rows:
        if not row.disagreements:
            continue
        first = min(row.disagreements, key=lambda d: (d.near_tie, d.prompt))
        judged = "a near-tie" if first.near_tie else "NOT a near-tie: an error"
        lines.append(
            f"{row.prompt_set}, batch {row.batch}, K={row.drafting}: {len(row.disagreements)} of "
            f"{row.texts} texts part; prompt {first.prompt} behind {first.position} equal tokens "
            f"(gap {first.gap:.3g}, rounding {first.rounding:.2g}, {judged})"
        )
    return lines


def slowest_lines(rows: Sequence[Row]) -> list[str]:
    """Of several rows, a line about the smallest median speed-up: whether it ever hurts."""
    if len(rows) < 2:
        return []
    row = min(rows, key=lambda row: row.speedup.median)
    place = f"{row.prompt_set}, batch {row.batch}, K={row.k}"
    return [f"least speed-up: {row.speedup.median:.2f}x ({place}), of {len(rows)} rows"]


def environment_line(report: Report) -> str:
    """Models, machine, versions and settings, in a line."""
    known = {**report.environment, **report.settings}
    return ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in known.items())


def markdown(report: Report) -> str:
    """A table with a line for each set and batch size, and a cell for each K; texts are summed."""
    ks = in_order(row.drafting for row in report.rows)
    head = ["prompts", "batch", "plain", *(f"K = {k}" for k in ks), "mean acceptance length"]
    head.append("identical / near-tie / wrong")
    lines = [head, ["---"] * len(head)]
    for place in dict.fromkeys((row.prompt_set, row.batch) for row in report.rows):
        of_k = {row.drafting: row for row in report.rows if (row.prompt_set, row.batch) == place}
        rows = [of_k[k] for k in ks]
        name = rows[0].prompt_set.replace("|", "\\|")
        cells = [name, str(rows[0].batch), f"{rows[0].plain_tokens_per_second:.0f} tok/s"]
        cells += [f"{row.speculative_tokens_per_second:.0f} tok/s, {_speedup(row)}" for row in rows]
        cells.append(", ".join(f"{row.mean_acceptance_length:.2f}" for row in rows))
        counts = ((row.identical, row.near_ties, row.wrong) for row in rows)
        cells.append(" / ".join(str(sum(count)) for count in zip(*counts, strict=True)))
        lines.append(cells)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    wrong = disagreement_lines([row for row in report.rows if row.wrong])
    return "\n\n".join([table, *wrong, *slowest_lines(report.rows), environment_line(report)])


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    cells: Callable[[Row], Sequence[str]],
) -> Table:
    """A line for each row: which it is, and what ``cells`` says of it; wrong ones in red."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\nprompts")
    has_trees = any(row.tree_nodes for row in rows)
    for name in ("\nbatch", "K/\ntree" if has_trees else "\nK", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        drafting = f"{row.k}/{row.tree_nodes}" if has_trees else str(row.k)
        place = (escape(row.prompt_set), str(row.batch), drafting)
        table.add_row(*place, *cells(row), style="red" if row.wrong else None)
    return table


def _speedup(row: Row) -> str:
    return f"{row.speedup.median:.2f}x ({row.speedup.min:.2f}-{row.speedup.max:.2f})"


def _megabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / _MEGABYTE:.0f}"


def _short(value: Any) -> str:
    return " ".join(str(v) for v in value) if isinstance(value, list) else str(value)
