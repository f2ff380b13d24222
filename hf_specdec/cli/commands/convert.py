"""`hf-specdec convert`: options and checks; the work is in `hf_specdec.cli.convert`."""

from typing import Annotated, Literal

import typer
from rich.console import Console


def convert(
    source: Annotated[
        str, typer.Argument(help="An fms .pth file, a checkpoint's folder, or a Hub id.")
    ],
    dest: Annotated[str, typer.Argument(help="A name ending in .pth for fms, else a folder.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights (default: as they are)."),
    ] = None,
    tie_weights: Annotated[
        bool | None,
        typer.Option(
            "--tie-weights/--no-tie-weights",
            help="Share tensors between the heads, if they are equal, or give each its own.",
        ),
    ] = None,
    scale_input: Annotated[
        bool | None,
        typer.Option(
            "--scale-input/--no-scale-input",
            help="fms files have no config and must be told; see how the speculator was trained.",
        ),
    ] = None,
    top_k: Annotated[
        str | None,
        typer.Option(help="fms files: top_k_tokens_per_head, such as 4,3,2,2 (default: IBM's)."),
    ] = None,
    n_candidates: Annotated[
        int | None, typer.Option(min=1, help="fms files: n_candidates (default: 5).")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the target, for config.json.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace DEST with all that is in it.")
    ] = False,
) -> None:
    """Convert a checkpoint of an MLP speculator, losing nothing.

    \b
    Examples:
      hf-specdec convert step_15000.pth my-accelerator --no-scale-input
      hf-specdec convert my-accelerator my-accelerator.pth
      hf-specdec convert my-accelerator half --dtype bfloat16
      hf-specdec convert arctic-checkpoint my-accelerator
      hf-specdec convert tied untied --no-tie-weights
    """
    from hf_specdec.cli.convert import run_convert
    from hf_specdec.conversion import ConvertOptions

    options = ConvertOptions(
        dtype=dtype,
        tie_weights=tie_weights,
        scale_input=scale_input,
        top_k_tokens_per_head=_integers(top_k),
        n_candidates=n_candidates,
        base_model=base_model,
        force=force,
    )
    run_convert(source, dest, options, Console())


def _integers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} must be integers joined by commas, such as 4,3,2,2", param_hint="--top-k"
        ) from None
