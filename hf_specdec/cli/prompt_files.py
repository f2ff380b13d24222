"""Prompts from files that users give."""

from pathlib import Path

import typer


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt a line, empty lines left out.

    Raises:
        typer.BadParameter: there is none.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = tuple(line for line in lines if line)
    if not prompts:
        raise typer.BadParameter(
            f"{path} has no prompt in it; write one a line", param_hint="--prompts"
        )
    return prompts
