"""A picture of a run's log: acceptance and loss against the tokens trained on.

Boundary: reads a log, writes a PNG.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_specdec.training.checkpoint import write_whole
from hf_specdec.training.training_log import LOG_FILE, read_log

PLOT_FILE = Path("training", "curve.png")


def plot_log(directory: str | Path, title: str = "") -> Path:
    """Draw ``training/log.jsonl`` of a drafter's folder into ``training/curve.png``.

    Args:
        directory: the drafter's folder.
        title: over the picture.

    Returns:
        The path of the picture.

    Raises:
        ImportError: matplotlib is not installed.
        FileNotFoundError: there is no log.
    """
    try:
        # Not pyplot: it keeps figures, and looks for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            'drawing the curve needs matplotlib: pip install "hf-specdec[train]"'
        ) from error
    log = Path(directory) / LOG_FILE
    if not log.is_file():
        raise FileNotFoundError(f"{log} is missing; training writes it")
    entries = read_log(log)
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    length, rates, losses = figure.subplots(3, 1, sharex=True)
    tokens = [entry["tokens_trained"] / 1e6 for entry in entries]
    length.plot(tokens, [entry["mean_acceptance_length"] for entry in entries], color="black")
    length.set_ylabel("mean acceptance length")
    _lines(rates, tokens, entries, "acceptance")
    rates.set_ylabel("accepted (held out)")
    _lines(losses, tokens, entries, "head_losses")
    losses.set_ylabel("training loss")
    losses.set_xlabel("million tokens trained on")
    for axes in (length, rates, losses):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    path = Path(directory) / PLOT_FILE
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=110))
    return path


def _lines(axes: Any, tokens: list[float], entries: list[dict[str, Any]], key: str) -> None:
    """One line for every draft position that all entries have."""
    for position in range(min(len(entry[key]) for entry in entries)):
        values = [entry[key][position] for entry in entries]
        axes.plot(tokens, values, label=f"draft {position + 1}")
    axes.legend(loc="best", fontsize="small")
