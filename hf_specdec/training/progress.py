"""A progress bar for work that takes minutes to days."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[int, str], None]


@contextmanager
def progress_bar(
    description: str,
    total: int | None,
    start: int = 0,
    enabled: bool = True,
    console: Console | None = None,
) -> Iterator[Advance]:
    """Show a bar while the block runs.

    Args:
        description: what is counted.
        total: the count at the end; ``None`` if unknown.
        start: the count already reached, when work is resumed.
        enabled: ``False`` shows nothing.
        console: where it is shown; standard output by default.

    Yields:
        ``advance(amount, status)``: count further and replace the text behind the bar.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    # Not refreshed by a thread of its own, which would take time from the work on a small machine.
    with Progress(*columns, auto_refresh=False, disable=not enabled, console=console) as bar:
        task = bar.add_task(description, total=total, completed=start, status="")

        def advance(amount: int, status: str = "") -> None:
            bar.update(task, advance=amount, status=status)
            bar.refresh()

        yield advance
