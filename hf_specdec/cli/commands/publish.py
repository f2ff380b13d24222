"""`hf-specdec publish`: options and checks; the work is in `hf_specdec.cli.publish`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def publish(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The drafter's folder.")
    ],
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Send it to the Hub (default: only prepare it)."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of the target, for its tokenizer (default: the card's)."
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the target (default: what config.json says).")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="The Hub's name of a licence, such as apache-2.0 or llama3.")
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="Hub id of a dataset it was trained on; may be repeated."),
    ] = None,
    speed: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File of hf-specdec bench --json."),
    ] = None,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="Add the target's tokenizer.")
    ] = True,
) -> None:
    """Make a drafter's folder ready for others: model card, code, tokenizer.

    Writes into FOLDER: a README.md, unless you wrote one; code for those
    who don't have hf_specdec; the target's tokenizer.

    \b
    Examples:
      hf-specdec publish my-drafter --license apache-2.0
      hf-specdec publish my-drafter --target path/to/target --speed speed.json
      hf-specdec publish my-drafter --license llama3 --push me/my-drafter
    """
    from hf_specdec.cli.publish import run_publish
    from hf_specdec.publishing.folder import PublishOptions

    options = PublishOptions(
        repo_id=push,
        target=target,
        base_model=base_model,
        license=license,
        datasets=tuple(dataset or ()),
        speed=speed,
        tokenizer=tokenizer,
    )
    run_publish(folder, options, push is not None, Console())
