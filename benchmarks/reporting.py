"""What the benchmarks have in common at their end: tables, Markdown, JSON, and the machine."""

import json
import sys

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec.benchmarking.environment import processor_name
from hf_specdec.benchmarking.plot import COLOURS, FORMATS

OURS, THEIRS = COLOURS[0], COLOURS[1]


def add_output_options(parser, plot=True):
    """``--json``, ``--markdown`` and ``--plot``."""
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of tables")
    if plot:
        parser.add_argument(
            "--plot",
            metavar="FILE",
            help=f"draw a picture ({', '.join(FORMATS)}); needs matplotlib",
        )


def machine():
    """Where the numbers are from."""
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "hf_specdec": hf_specdec.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(title, columns, rows, as_markdown):
    """Print cells; columns of words are to the left, those that begin with a digit to the right."""
    if as_markdown:
        lines = [columns, ["---"] * len(columns), *rows]
        print(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
        is_number = cells[-1][:1].isdigit() or cells[-1][:1] == "-"
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # In a file or a pipe as wide as it needs.
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(f"\n{title}", style="bold", markup=False, highlight=False)
    console.print(table, markup=False)


def write_json(path, numbers, **settings):
    """The numbers, with settings and machine, if a path is given."""
    if path:
        content = {"machine": machine(), "settings": settings, "numbers": numbers}
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")


def spread(values):
    """Median and range of ratios, as text."""
    median, least, most = values
    return f"{median:.2f}x ({least:.2f}-{most:.2f})"
