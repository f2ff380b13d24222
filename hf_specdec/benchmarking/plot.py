"""A report as a picture: speed-up by prompt set, K and batch size, and acceptance by position."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specdec.benchmarking.results import Report, Row, in_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which readers with any kind of colour vision can tell apart; the markers
# tell the same without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FORMATS = (".png", ".pdf", ".svg")
_DOTS_PER_INCH = 150
_PANEL_WIDTH, _HEIGHT = 4.2, 4.0
# Between the points of one set, and the most that all of them take, where sets are 1 apart.
_STEP, _SPREAD = 0.2, 0.6


def save_plot(report: Report, path: Path) -> None:
    """Draw the report into a file; its suffix (one of `FORMATS`) says the format.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    figure = draw(report)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def draw(report: Report) -> Figure:
    """One panel of speed-ups for each batch size, and one of acceptance."""
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(row.batch for row in report.rows))
    panels = len(batches) + 1
    figure = Figure(figsize=(_PANEL_WIDTH * panels, _HEIGHT), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis, batch in zip(axes, batches, strict=False):
        _draw_speedup(axis, [row for row in report.rows if row.batch == batch])
        axis.set_title(f"batch {batch}")
        axis.sharey(axes[0])
    axes[0].set_ylabel("speed-up over plain generate")
    axes[0].legend(loc="best", fontsize="small")
    axes[0].set_ylim(bottom=0)
    _draw_acceptance(axes[-1], report.rows)
    return figure


def _draw_speedup(axis: Any, rows: list[Row]) -> None:
    """A point for each set and K: the median, with a line from the smallest to the largest."""
    sets = list(dict.fromkeys(row.prompt_set for row in rows))
    ks = in_order(row.drafting for row in rows)
    step = min(_STEP, _SPREAD / max(len(ks) - 1, 1))
    for number, k in enumerate(ks):
        shift = step * (number - (len(ks) - 1) / 2)
        of_k = [row for row in rows if row.drafting == k]
        middle = [row.speedup.median for row in of_k]
        below = [row.speedup.median - row.speedup.min for row in of_k]
        above = [row.speedup.max - row.speedup.median for row in of_k]
        axis.errorbar(
            [sets.index(row.prompt_set) + shift for row in of_k],
            middle,
            yerr=(below, above),
            linestyle="none",
            capsize=3,
            label=f"K = {k}",
            **_look(number),
        )
    axis.axhline(1.0, color="0.4", linewidth=1, linestyle="--")
    axis.set_xticks(range(len(sets)), sets, rotation=20, ha="right", rotation_mode="anchor")
    axis.set_xlim(-0.6, len(sets) - 0.4)
    axis.grid(axis="y", color="0.9")
    axis.set_axisbelow(True)


def _draw_acceptance(axis: Any, rows: list[Row]) -> None:
    """A line for each set: the rate at every draft position, of the largest K and first batch."""
    k = in_order(row.drafting for row in rows)[-1]
    shown = [row for row in rows if row.drafting == k and row.batch == rows[0].batch]
    for number, row in enumerate(shown):
        positions = range(1, len(row.per_position) + 1)
        label = f"{row.prompt_set} ({row.mean_acceptance_length:.2f})"
        axis.plot(positions, row.per_position, label=label, **_look(number))
    axis.set_title(f"acceptance, K = {k}, batch {rows[0].batch}")
    axis.set_xlabel("draft position")
    axis.set_ylabel("drafts accepted this far")
    axis.set_xticks(range(1, max(*(len(row.per_position) for row in shown), 1, 1) + 1))
    axis.set_ylim(-0.03, 1.03)  # room for the markers at both ends
    axis.grid(axis="y", color="0.9")
    axis.legend(title="prompts (mean acceptance length)", fontsize="small", title_fontsize="small")


def _look(number: int) -> dict[str, str]:
    """Colour and marker of the n-th series."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
    }
