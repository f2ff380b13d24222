"""`hf-specdec doctor`: options and checks; the work is in `hf_specdec.cli.doctor`."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from hf_specdec.cli.prompt_files import read_prompts


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

    \b
    Examples:
      hf-specdec doctor zai-org/GLM-4.5-Air
      hf-specdec doctor meta-llama/Meta-Llama-3-8B-Instruct ibm-ai-platform/llama3-8b-accelerator
    """
    from hf_specdec.cli.demo import DEFAULT_PROMPTS
    from hf_specdec.cli.doctor import DoctorSettings, run_doctor

    settings = DoctorSettings(
        target=target,
        assistant=assistant,
        prompts=DEFAULT_PROMPTS if prompts is None else read_prompts(prompts),
        max_new_tokens=max_new_tokens,
        num_assistant_tokens=num_assistant_tokens,
        dtype=dtype,
        device=device,
    )
    run_doctor(settings, Console())
