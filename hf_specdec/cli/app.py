"""The command line: what commands there are. Each is a file of `commands`.

Everything slow to import (torch, transformers) is imported inside the commands.
"""

from typing import Annotated

import typer

from hf_specdec._version import __version__
from hf_specdec.cli.commands.demo import demo
from hf_specdec.cli.commands.doctor import doctor
from hf_specdec.cli.commands.train import train

app = typer.Typer(
    name="hf-specdec",
    help="Speculative decoding for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"hf-specdec {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face transformers."""


app.command()(demo)
app.command()(doctor)
app.command()(train)


def main() -> None:
    """Entry point of the command `hf-specdec`."""
    app()
