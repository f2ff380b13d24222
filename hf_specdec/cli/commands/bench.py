"""`hf-specdec bench`: options and checks; the work is in `hf_specdec.cli.bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_specdec.cli.options import (
    Compile,
    Device,
    Dtype,
    Lookup,
    PackWeights,
    SpecMethod,
    SpecModel,
    SpecTokens,
    SpeculativeConfigJson,
    Target,
    draft_tokens,
    pair_settings,
)
from hf_specdec.cli.spread import DeviceMap, MaxMemory, OffloadFolder, spread

_SYNTHETIC = "A drafter of known quality"


def bench(
    target: Target,
    k: Annotated[
        list[Any] | None,
        typer.Option(
            parser=draft_tokens,
            metavar="K...",
            help="Draft tokens a step, or auto (default: the drafter's).",
        ),
    ] = None,
    tree_nodes: Annotated[
        list[int] | None,
        typer.Option(
            "--tree-nodes",
            min=0,
            metavar="N...",
            help="Trees of N drafts for each K above 0; 0: chains (default).",
        ),
    ] = None,
    lookup: Lookup = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, metavar="B...", help="Batch sizes (default: 1).")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SET...",
            help="Built-in prompts: chat, code, summarising, maths (default: these), general.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, metavar="FILE", help="Your own prompts, one a line."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts of each set.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens to generate for each prompt.")
    ] = 128,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed runs of each kind on each batch.")
    ] = 2,
    speculative_config: SpeculativeConfigJson = None,
    spec_method: SpecMethod = None,
    spec_model: SpecModel = None,
    spec_tokens: SpecTokens = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    pack_weights: PackWeights = False,
    compiles: Compile = False,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="CPU threads (default: torch's choice).")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="Write the numbers here.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="FILE", help="Draw here: .png, .svg or .pdf."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print one Markdown table instead of two.")
    ] = False,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="RATE",
            help="Draft the known text, right with this probability a token.",
            rich_help_panel=_SYNTHETIC,
        ),
    ] = None,
    synthetic_draft_cost: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="MS",
            help="Milliseconds it spends on a draft token.",
            rich_help_panel=_SYNTHETIC,
        ),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of its mistakes.", rich_help_panel=_SYNTHETIC)
    ] = 0,
) -> None:
    """Measure speed and acceptance with and without a drafter, greedy, run by run in turn.

    Fails if a text differs from plain generate's for another reason than
    rounding. With --pack-weights the runs with a drafter have packed weights,
    the plain ones don't; K = 0 shows what the packing alone brings. The same
    with --compile, whose functions are compiled before anything is timed.

    \b
    Examples:
      hf-specdec bench demo --k 1 2 3 --batch 1 8 --plot bench.png
      hf-specdec bench zai-org/GLM-4.5-Air --spec-method mtp --set code maths
      hf-specdec bench demo --k 0 3 auto --pack-weights
      hf-specdec bench demo --k 3 --tree-nodes 0 4 8
      hf-specdec bench demo --k 3 --prompt-lookup 8
      hf-specdec bench demo --synthetic-acceptance 0.7 --k 3
    """
    from hf_specdec.cli.bench import (
        BenchSettings,
        check_files,
        chosen_draft_tokens,
        chosen_prompts,
        chosen_tree_nodes,
        run_bench,
    )

    pair = pair_settings(
        target,
        speculative_config,
        spec_method,
        spec_model,
        spec_tokens,
        dtype,
        device,
        pack_weights,
        compiles,
        lookup=lookup,
        spread=spread(device_map, max_memory, offload_folder, device, compiles, pack_weights),
    )
    options = (speculative_config, spec_method, spec_model, spec_tokens, lookup)
    names_drafter = any(option is not None for option in options)
    check_files(json, plot)
    settings = BenchSettings(
        pair=pair,
        prompts=chosen_prompts(set_ or [], prompts, limit),
        tree_nodes=chosen_tree_nodes(tree_nodes or [], pair, synthetic_acceptance),
        ks=chosen_draft_tokens(k or [], pair, names_drafter, synthetic_acceptance),
        batches=tuple(dict.fromkeys(batch or [1])),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        threads=threads,
        acceptance=synthetic_acceptance,
        draft_seconds=synthetic_draft_cost / 1000,
        seed=seed,
        json=json,
        plot=plot,
        markdown=markdown,
    )
    report = run_bench(settings, Console())
    if report.wrong:
        typer.echo(f"hf-specdec bench: {report.wrong} texts are not the target's own", err=True)
        raise typer.Exit(code=1)
