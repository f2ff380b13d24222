"""`hf-specdec bench`: load a pair, measure it, and show, write and draw what was found."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hf_specdec.attach import detach
from hf_specdec.benchmarking import (
    Pair,
    Report,
    Workload,
    check,
    default_draft_tokens,
    measure,
    prompt_sets,
)
from hf_specdec.benchmarking.environment import describe_environment
from hf_specdec.benchmarking.memory import PeakMemory
from hf_specdec.benchmarking.plot import FORMATS, save_plot
from hf_specdec.benchmarking.tables import (
    disagreement_lines,
    environment_line,
    markdown,
    slowest_lines,
    tables,
)
from hf_specdec.cli.demo_pair import DRAFTER_DIRECTORY
from hf_specdec.cli.options import DEMO, PairSettings
from hf_specdec.cli.pairs import load_pair
from hf_specdec.cli.prompt_files import read_prompts
from hf_specdec.integration import ATTACHED
from hf_specdec.modeling.placement import input_device
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.options.schedule import NumDraftTokens

DEFAULT_SETS = ("chat", "code", "summarising", "maths")


@dataclass(frozen=True)
class BenchSettings:
    """What the user chose.

    Attributes:
        pair: target and drafter; the drafter is left out with a synthetic one.
        prompts: for each set its prompts.
        ks: draft tokens a step; empty leaves it to the drafter.
        tree_nodes: drafts of a tree, 0 for chains; empty leaves it to the config.
        batches, max_new_tokens, repeats, acceptance, draft_seconds, seed: see `Workload`.
        threads: of the CPU; ``None`` leaves it to torch.
        json, plot: files to write.
        markdown: print Markdown.
    """

    pair: PairSettings
    prompts: Mapping[str, Sequence[str]]
    ks: tuple[NumDraftTokens, ...] = ()
    tree_nodes: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    max_new_tokens: int = 128
    repeats: int = 2
    threads: int | None = None
    acceptance: float | None = None
    draft_seconds: float = 0.0
    seed: int = 0
    json: Path | None = None
    plot: Path | None = None
    markdown: bool = False


def chosen_prompts(
    sets: Sequence[str], file: Path | None, limit: int | None
) -> dict[str, tuple[str, ...]]:
    """The named sets and the file, which is a set of its own name.

    Raises:
        typer.BadParameter: an unknown set, or a file without prompts.
    """
    try:
        chosen = prompt_sets(sets if sets or file is not None else DEFAULT_SETS)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from None
    if file is not None:
        try:
            chosen[file.name] = read_prompts(file)
        except UnicodeDecodeError:
            raise typer.BadParameter(
                f"{file} is not a text in UTF-8; write one prompt a line", param_hint="--prompts"
            ) from None
    return {name: prompts[:limit] for name, prompts in chosen.items()}


def chosen_draft_tokens(
    ks: Sequence[NumDraftTokens],
    pair: PairSettings,
    names_drafter: bool,
    acceptance: float | None,
) -> tuple[NumDraftTokens, ...]:
    """Each K once; none if the drafter is to decide.

    Args:
        ks: of ``--k``.
        pair: with the number that its config names.
        names_drafter: whether an option about the drafter was given.
        acceptance: of a synthetic drafter.

    Raises:
        typer.BadParameter: no drafter, two of them, two sources of K, or none.
    """
    config = pair.speculative_config
    if acceptance is not None:
        if names_drafter:
            raise typer.BadParameter(
                "it drafts in place of a real drafter: leave --speculative-config and --spec-... "
                "out, or this option",
                param_hint="--synthetic-acceptance",
            )
        if not ks:
            raise typer.BadParameter(
                "a synthetic drafter has no K of its own: give one or more", param_hint="--k"
            )
    elif config is None:
        raise typer.BadParameter(
            f"{pair.target} has no drafter to measure: name one with --spec-model, use the "
            "target's own layers with --spec-method mtp, or give --synthetic-acceptance",
            param_hint="--spec-model",
        )
    elif config.num_speculative_tokens is not None:
        if ks:
            raise typer.BadParameter(
                f"K is {config.num_speculative_tokens} in the speculative config already: give "
                "one of the two",
                param_hint="--k",
            )
        return (config.num_speculative_tokens,)
    return tuple(dict.fromkeys(ks))


def chosen_tree_nodes(
    tree_nodes: Sequence[int], pair: PairSettings, acceptance: float | None
) -> tuple[int, ...]:
    """Each number of nodes once; those of the config if none is given.

    Args:
        tree_nodes: of ``--tree-nodes``.
        pair: with the tree that its config names.
        acceptance: of a synthetic drafter.

    Raises:
        typer.BadParameter: trees of a synthetic drafter, two sources of trees, or a given tree.
    """
    if acceptance is not None and any(tree_nodes):
        raise typer.BadParameter("a synthetic drafter drafts chains", param_hint="--tree-nodes")
    config = pair.speculative_config
    if config is not None and config.speculative_token_tree is not None:
        raise typer.BadParameter(
            "speculative_token_tree can't be measured here: compare trees by their number of "
            "nodes, with --tree-nodes",
            param_hint="--speculative-config",
        )
    if config is not None and config.num_tree_nodes is not None:
        if tree_nodes:
            raise typer.BadParameter(
                f"num_tree_nodes is {config.num_tree_nodes} in the speculative config already: "
                "give one of the two",
                param_hint="--tree-nodes",
            )
        return (config.num_tree_nodes,)
    return tuple(dict.fromkeys(tree_nodes))


def check_files(json: Path | None, plot: Path | None) -> None:
    """Find out before anything is measured whether the results can be kept.

    Raises:
        typer.BadParameter: a folder that isn't there, a format that isn't known, or no matplotlib.
    """
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(
                f"{path}: there is no folder {path.absolute().parent}", param_hint=option
            )
    if plot is None:
        return
    if plot.suffix.lower() not in FORMATS:
        raise typer.BadParameter(
            f"{plot}: the name must end in one of {list(FORMATS)}", param_hint="--plot"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "drawing needs matplotlib, which is not installed: pip install matplotlib, or leave "
            "--plot out",
            param_hint="--plot",
        )


def run_bench(settings: BenchSettings, console: Console) -> Report:
    """Measure, print, and write the files.

    Args:
        settings: what to do.
        console: for the result; progress goes to standard error.

    Raises:
        DemoPairUnavailableError: the demo's target is asked for and not installed.
        OSError, ValueError: a pair that can't be loaded or doesn't fit, or a K it can't draft.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    pair, workload = _prepare(settings)
    check(pair, workload)
    report = Report(
        describe_environment(pair.target, PeakMemory(input_device(pair.target)).kind),
        _describe(settings, workload),
        [],
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Not refreshed by a thread of its own, which would take time from the measured runs.
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
    ) as progress:
        task = progress.add_task("warming up", total=workload.num_timed_groups)

        def advance(where: str) -> None:
            progress.update(task, advance=1, description=where)
            progress.refresh()

        report.rows.extend(measure(pair, workload, advance))
    _show(report, console, settings.markdown)
    if settings.json is not None:
        report.write(settings.json)
    if settings.plot is not None:
        save_plot(report, settings.plot)
    return report


def _prepare(settings: BenchSettings) -> tuple[Pair, Workload]:
    """Load the pair; the drafter is passed to each call instead of being attached."""
    wanted = settings.pair
    if settings.acceptance is not None:
        wanted = replace(wanted, speculative_config=None)
    loaded = load_pair(replace(wanted, compiles=False))
    attachment = loaded.target.__dict__.get(ATTACHED)
    detach(loaded.target)
    pair = Pair(loaded.target, loaded.tokenizer, attachment and attachment.assistant)
    workload = Workload(
        prompts=settings.prompts,
        ks=settings.ks or (default_draft_tokens(pair),),
        tree_nodes=settings.tree_nodes or (0,),
        batches=settings.batches,
        max_new_tokens=settings.max_new_tokens,
        repeats=settings.repeats,
        schedule=attachment and attachment.config.num_speculative_tokens_per_batch_size,
        acceptance=settings.acceptance,
        draft_seconds=settings.draft_seconds,
        seed=settings.seed,
        compiles=settings.pair.compiles,
        lookup=_lookup(attachment and attachment.config),
    )
    return pair, workload


def _lookup(config: SpeculativeConfig | None) -> dict[str, int]:
    """What a config says about prompt lookup."""
    names = ("prompt_lookup_num_tokens", "prompt_lookup_max", "prompt_lookup_min")
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _describe(settings: BenchSettings, workload: Workload) -> dict[str, Any]:
    """What was measured, for whoever reads the numbers later."""
    described: dict[str, Any] = {"target": settings.pair.target}
    config = settings.pair.speculative_config
    if settings.acceptance is not None:
        described["drafter"] = "synthetic"
        described["acceptance"] = settings.acceptance
        described["draft_milliseconds"] = 1000 * settings.draft_seconds
        described["seed"] = settings.seed
    elif config is not None:
        # The demo's drafter by name: where this package is installed is nobody's business.
        is_demo = config.model == str(DRAFTER_DIRECTORY)
        described["drafter"] = DEMO if is_demo else config.model or config.method or "mtp"
    described.update(workload.lookup)
    if workload.schedule is not None:
        described["num_speculative_tokens_per_batch_size"] = [list(s) for s in workload.schedule]
    if settings.pair.pack_weights:
        described["pack_weights"] = "in speculative runs"
    if settings.pair.compiles:
        described["compile"] = "in speculative runs"
    described["max_new_tokens"] = workload.max_new_tokens
    described["repeats"] = workload.repeats
    return described


def _show(report: Report, console: Console, as_markdown: bool) -> None:
    """Print the tables, and where texts part."""
    if as_markdown:
        # Not wrapped, whatever the terminal's width.
        console.print(markdown(report), markup=False, highlight=False, soft_wrap=True)
        return
    for table in tables(report.rows):
        console.print(table)
    for line in [*disagreement_lines(report.rows), *slowest_lines(report.rows)]:
        console.print(line, markup=False, highlight=False)
    console.print(environment_line(report), style="dim", markup=False, highlight=False)
