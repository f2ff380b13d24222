"""The command line: what commands there are. Each is a file of `commands`.

Everything slow to import (torch, transformers) is imported inside the commands.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from hf_specdec._version import __version__
from hf_specdec.cli.commands.bench import bench
from hf_specdec.cli.commands.convert import convert
from hf_specdec.cli.commands.demo import demo
from hf_specdec.cli.commands.doctor import doctor
from hf_specdec.cli.commands.generate import generate
from hf_specdec.cli.commands.inspect import inspect
from hf_specdec.cli.commands.publish import publish
from hf_specdec.cli.commands.serve import serve
from hf_specdec.cli.commands.train import train
from hf_specdec.cli.demo_pair import DemoPairUnavailableError
from hf_specdec.cli.list_options import ListOptionsCommand
from hf_specdec.startup import complete_package

Function = TypeVar("Function", bound=Callable[..., Any])
# The help lists commands under these headings.
PANELS = {
    "Run models": ("demo", "generate", "serve"),
    "Look and measure": ("inspect", "bench", "doctor"),
    "Make drafters": ("train", "convert", "publish"),
}
# Errors whose message says what to do; anything else is a bug and shows where it happened.
EXPLAINED = (DemoPairUnavailableError, OSError, ValueError)


class CommandLine(typer.Typer):
    """Commands that are answered fast, filed under a heading, and fail without a traceback."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Register a command: ``app.command()(function)``."""

        def register(function: Function) -> Function:
            command = name or function.__name__.replace("_", "-")
            panel = next((p for p, names in PANELS.items() if command in names), None)
            settings = {"rich_help_panel": panel, **options}
            decorate = super(CommandLine, self).command(command, **settings)
            decorate(_runnable(command, function))
            return function

        return register


def _runnable(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a command: hf_specdec is imported in full before it runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        complete_package()
        try:
            return function(*args, **kwargs)
        except EXPLAINED as error:
            typer.echo(f"hf-specdec {name}: {error}", err=True)
            raise typer.Exit(code=1) from error

    return run


app = CommandLine(
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


app.command()(convert)
app.command()(demo)
app.command()(doctor)
app.command()(publish)
app.command(cls=ListOptionsCommand)(bench)
app.command()(generate)
app.command()(inspect)
app.command()(serve)
app.command()(train)


def main() -> None:
    """Entry point of the command `hf-specdec`."""
    app()
