"""What a call leaves behind, kind by kind: the same calls in rounds, and the bytes malloc gave out.

    python benchmarks/soak_rounds.py --calls 60 --rounds 3 --json docs/soak_rounds.json

Resident memory also grows by holes in the heap, and by tables that fill with what they haven't seen
(the times that ``"auto"`` remembers, shapes of trees). Calls that were all made before can't fill a
table: what grows from one round to the next has been left behind. Needs glibc 2.33 or newer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from soak_kinds import KINDS, World
from soak_models import TARGETS, make_pair, make_tokenizer


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    """Bytes that malloc has given out and not got back, large blocks included.

    Raises:
        RuntimeError: the C library doesn't say.
    """
    gc.collect()
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        raise RuntimeError("needs mallinfo2 of glibc 2.33 or newer, and this C library has none")
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def left_by_kind(name: str, world: World, calls: int, rounds: int) -> list[float]:
    """Bytes a call of this kind leaves behind, in each round after the first.

    Args:
        name: of `soak_kinds.KINDS`.
        world: what the calls share.
        calls: how many different ones.
        rounds: how often all of them are made.

    Returns:
        ``rounds - 1`` numbers.
    """
    before, left = 0, []
    for turn in range(rounds):
        for number in range(calls):
            choice = random.Random(f"{name}:{number}")
            torch.manual_seed(number)
            # What a kind finds wrong is the soak's business.
            with contextlib.suppress(Exception):
                KINDS[name][0](choice, world)
        after = bytes_in_use()
        if turn:
            left.append((after - before) / calls)
        before = after
    return left


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=60, help="different calls of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="how often they are made")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    bytes_in_use()  # before anything heavy
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = World([make_pair(name) for name in [*TARGETS, "gemma4"]], make_tokenizer())
    console = Console()
    result: dict[str, Any] = {}
    for name in track(arguments.kinds, console=console, transient=True):
        result[name] = left_by_kind(name, world, arguments.calls, arguments.rounds)
    table = Table(title=f"bytes a call, {arguments.calls} calls of each kind again and again")
    table.add_column("kind")
    for turn in range(1, arguments.rounds):
        table.add_column(f"round {turn + 1}", justify="right")
    for name, left in result.items():
        table.add_row(name, *(f"{value:,.0f}" for value in left))
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
