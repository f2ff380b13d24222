"""`hf-specdec inspect`: options; the work is in `hf_specdec.cli.inspect` and `inspection`."""

from typing import Annotated

import typer
from rich.console import Console

from hf_specdec.cli import options


def inspect(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER", help='Hub id or folder; "demo": the drafter of the demo pair.'
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Hub id or folder of a target: does it fit?"),
    ] = None,
    dtype: options.Dtype = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a drafter is, and whether it fits a target.

    With the lines that run it. Read from configs and headers; no weights are loaded. If the
    drafter doesn't fit --target, the exit code is 1.

    \b
    Examples:
      hf-specdec inspect ibm-ai-platform/llama3-8b-accelerator
      hf-specdec inspect DRAFTER --target meta-llama/Meta-Llama-3-8B-Instruct --dtype bfloat16
      hf-specdec inspect XiaomiMiMo/MiMo-7B-RL --json
    """
    from hf_specdec.cli.inspect import run_inspect

    found = run_inspect(drafter, target, dtype, as_json, Console())
    if found.fits is False:
        raise typer.Exit(code=1)
