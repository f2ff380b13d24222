"""An hour of mixed calls in one process: texts stay right, and nothing is left behind.

    python benchmarks/soak.py --minutes 60 --json docs/soak.json --plot docs/soak.png
    python benchmarks/soak.py --seed 0 --only 1234        # call 1234 of seed 0 again, alone

Tiny random models of five families, float32. Every call is random: batch size, lengths, drafter,
number of drafts, sampling, outputs, streamers, caches that pass from turn to turn, attached
targets, pipelines, threads, static shapes; a third of the calls fail, by an exception thrown in
from a random place or by an argument that is refused. Texts are compared with plain ``generate``,
row by row; sampled ones with transformers' own greedy loop over logits with the noise of the row's
seed. After every call models, configs and switches must be what they were. The exit code is 1 if
anything was wrong, or if memory grows by more than --most-growth.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from soak_models import TARGETS
from soak_run import Report, Soak

SHOWN = 20  # failures


def soak(arguments: argparse.Namespace, console: Console) -> Report:
    """Run it with a bar."""
    made = Soak(arguments.seed, arguments.targets)
    if arguments.only is not None:
        return made.run(lambda report: True, first=arguments.only)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[says]}"),
        TimeRemainingColumn(),
    )
    seconds = 60 * arguments.minutes
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("soaking", total=arguments.calls or seconds, says="")

        def is_over(report: Report) -> bool:
            done = report.calls if arguments.calls else report.seconds
            memory = f", {report.memory[-1][1]:.0f} MiB" if report.memory else ""
            says = f"{report.calls} calls, {len(report.failures)} failures{memory}"
            progress.update(task, completed=done, says=says)
            return done >= (arguments.calls or seconds)

        return made.run(is_over)


def is_flat(report: Report, most: float) -> bool:
    """Whether the second half's memory grows by less than ``most`` MiB an hour."""
    growth = report.growth()
    return growth is None or growth <= most


def show(report: Report, most_growth: float, console: Console) -> None:
    """A table of everything, and the first failures."""
    table = Table(title=f"{report.calls} calls in {report.seconds / 60:.1f} minutes")
    table.add_column("what")
    table.add_column("how many", justify="right")
    for kind, count in report.kinds.most_common():
        table.add_row(kind, str(count))
    table.add_section()
    outcome = report.outcome
    for name, value in (
        ("tokens compared", outcome.tokens),
        ("drafted tokens", outcome.drafts),
        ("of them accepted", outcome.accepted),
        ("exceptions thrown in", outcome.injected),
        ("texts that differ from plain generate", outcome.unequal),
        ("hooks left behind", report.most_leaked_hooks),
        ("failures of any kind", len(report.failures)),
        ("types of objects that grow", len(report.grown)),
    ):
        table.add_row(name, str(value))
    if report.memory:
        table.add_section()
        half = [m for t, m in report.memory if t >= report.seconds / 2] or [report.memory[-1][1]]
        table.add_row("resident memory, first and last", _mib(report.memory[0][1], half[-1]))
        table.add_row("in the second half, least and most", _mib(min(half), max(half)))
        if (growth := report.growth()) is not None:
            table.add_row("growth in the second half", f"{growth:+.1f} MiB an hour")
    console.print(table)
    for failure in report.failures[:SHOWN]:
        console.print(failure, markup=False, soft_wrap=True)
    if report.grown:
        console.print(f"growing: {report.grown}", markup=False, soft_wrap=True)
    if not is_flat(report, most_growth):
        console.print(f"memory grows by more than {most_growth} MiB an hour")


def _mib(*values: float) -> str:
    return ", ".join(f"{value:.0f}" for value in values) + " MiB"


def plot(report: Report, file: Path) -> None:
    """Resident memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    axis.plot([t / 60 for t, _ in report.memory], [m for _, m in report.memory])
    axis.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, None))
    axis.set_title(f"{report.calls} mixed calls in one process")
    axis.grid(color="0.9")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--calls", type=int, help="so many calls, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="call N of this seed, and no other")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS, "gemma4"], default=None)
    parser.add_argument("--most-growth", type=float, default=16, help="MiB an hour")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw memory over time into this file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    console = Console()
    report = soak(arguments, console)
    show(report, arguments.most_growth, console)
    if arguments.json:
        result = {"machine": machine(), "numbers": report.as_json()}
        # Hundreds of pairs of numbers, each a line otherwise.
        arguments.json.write_text(json.dumps(result) + "\n")
    if arguments.plot:
        plot(report, arguments.plot)
    if report.failures or report.grown or not is_flat(report, arguments.most_growth):
        sys.exit(1)


if __name__ == "__main__":
    main()
