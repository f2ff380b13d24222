"""`hf-specdec train`: options and checks; the work is in `hf_specdec.training` and `cli.train`."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from hf_specdec.cli.options import Device, Dtype, Target

_DATA = "Data"
_RECIPE = "Recipe (default: the preset's)"
_SHAPE = "The drafter's shape (default: the preset's)"


def train(
    target: Target,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the drafter; a run goes on there.")
    ],
    kind: Annotated[
        Literal["mlp", "mtp"],
        typer.Option(metavar="KIND", help="mlp, for any decoder; mtp, for Llama, Qwen2, Mistral."),
    ] = "mlp",
    preset: Annotated[
        Literal["small", "ibm"],
        typer.Option(metavar="PRESET", help="small, or ibm: the published recipe."),
    ] = "small",
    time_budget: Annotated[
        float | None, typer.Option(metavar="X", help="Minutes for all of it.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|ID",
            help="Texts, prompts or chats: files, folders, Hub data sets (owner/name:config). "
            "Without, a chat model writes its own prompts.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column with texts.", rich_help_panel=_DATA)
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column with prompts.", rich_help_panel=_DATA)
    ] = None,
    messages_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column with conversations.", rich_help_panel=_DATA),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Split of a Hub data set.", rich_help_panel=_DATA)
    ] = "train",
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Of the target's texts, for several runs (default: in OUT).",
            rich_help_panel=_DATA,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="To generate; 0: train on what there is.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    text_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Of given text, for stage 1.", rich_help_panel=_DATA),
    ] = None,
    keep_states: Annotated[
        bool | None,
        typer.Option(
            help="Keep the target's states on disk (default: if they fit).",
            rich_help_panel=_DATA,
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Of a generated answer, at most.", rich_help_panel=_DATA
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Documents generated side by side.", rich_help_panel=_DATA
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of the last stage.", rich_help_panel=_RECIPE),
    ] = None,
    text_steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of stage 1, on text.", rich_help_panel=_RECIPE),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Passes over the last stage's data.", rich_help_panel=_RECIPE
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(metavar="X", help="Peak of the schedule.", rich_help_panel=_RECIPE),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Positions (mlp) or windows (mtp) of a step.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    accumulation: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Parts a step is run in.", rich_help_panel=_RECIPE),
    ] = 1,
    head_weights: Annotated[
        str | None,
        typer.Option(
            metavar="X,X,..", help='What each head counts, "1,0.8,0.6".', rich_help_panel=_RECIPE
        ),
    ] = None,
    sampled_softmax: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Ids drawn a step; 0: all ids.", rich_help_panel=_RECIPE
        ),
    ] = None,
    precision: Annotated[
        Literal["bf16", "fp32"] | None,
        typer.Option(help="Of the forward in training.", rich_help_panel=_RECIPE),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Evaluations without progress to stop after.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Steps (default: forty evaluations).", rich_help_panel=_RECIPE
        ),
    ] = None,
    held_out_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="One document in so many is for evaluation.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps.", rich_help_panel=_RECIPE)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of data, weights and order.", rich_help_panel=_RECIPE),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Draft tokens to train for.", rich_help_panel=_SHAPE),
    ] = None,
    inner_dim: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Width of an mlp's state.", rich_help_panel=_SHAPE),
    ] = None,
    share_target_weights: Annotated[
        bool | None,
        typer.Option(help="Read the target's token tables.", rich_help_panel=_SHAPE),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Ids it can draft; 0: all.", rich_help_panel=_SHAPE),
    ] = None,
    continue_from: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Drafter to begin with.",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    target_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The drafter's name for it (default: TARGET)."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train a drafter for a target, on text that the target writes itself.

    \b
    Examples:
      hf-specdec train demo --out my-drafter --time-budget 60
      hf-specdec train my-model --kind mlp --data prompts.jsonl --out my-drafter
      hf-specdec train my-llama --kind mtp --data owner/chats --corpus corpora --out my-mtp
      torchrun --nproc-per-node 2 -m hf_specdec train my-model --out my-drafter
    """
    options = dict(locals())
    started = time.monotonic()
    from hf_specdec.cli.demo_pair import DemoPairUnavailableError
    from hf_specdec.cli.train import TargetChoice, run_train

    try:
        run = replace(_run(options), started=started)
        run_train(run, TargetChoice(target, dtype, device), Console())
    except (DemoPairUnavailableError, ImportError, OSError, RuntimeError, ValueError) as error:
        typer.echo(f"hf-specdec train: {error}", err=True)
        raise typer.Exit(code=1) from None


def _run(options: dict[str, Any]) -> Any:
    """The run that the options describe."""
    from hf_specdec.training.recipes import recipe
    from hf_specdec.training.run import TrainingRun

    shape = ("heads", "inner_dim", "share_target_weights", "draft_vocab")
    given = [name for name in shape if options[name] is not None]
    if given and options["continue_from"] is not None and options["kind"] == "mlp":
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--continue-from keeps the drafter's shape, so leave out {named}")
    chosen = recipe(options["preset"], options["kind"])
    chosen = replace(
        chosen,
        training=_training(chosen.training, options),
        network=_changed(
            chosen.network,
            heads=options["heads"],
            inner_dim=options["inner_dim"],
            share_target_weights=options["share_target_weights"],
            draft_vocab_size=options["draft_vocab"],
        ),
        corpus=_changed(
            chosen.corpus,
            tokens=options["tokens"],
            text_tokens=options["text_tokens"],
            answer_tokens=options["answer_tokens"],
            keep_states=options["keep_states"],
            rows=options["rows"],
            seed=options["seed"],
        ),
    )
    if options["time_budget"] is not None and options["tokens"] is None:
        chosen = replace(chosen, corpus=replace(chosen.corpus, tokens=None))
    return TrainingRun(
        kind=options["kind"],
        out=options["out"],
        recipe=chosen,
        data=_data(options),
        corpus=options["corpus"],
        target_name=options["target_name"],
        continue_from=options["continue_from"],
        time_budget=options["time_budget"],
        evaluate_every=options["evaluate_every"],
    )


def _training(settings: Any, options: dict[str, Any]) -> Any:
    """The preset's settings with what was given."""
    weights = options["head_weights"]
    if weights is not None:
        try:
            weights = tuple(float(weight) for weight in weights.split(","))
        except ValueError:
            raise ValueError(
                f"--head-weights {weights!r} must be numbers, as in 1,0.8,0.6"
            ) from None
    stage = settings.self_generated
    if options["epochs"] is not None:
        # A preset's number of steps would count more.
        stage = replace(stage, steps=None)
    stage = _changed(
        stage,
        steps=options["steps"],
        epochs=options["epochs"],
        batch_size=options["batch_size"],
    )
    return _changed(
        settings,
        learning_rate=options["learning_rate"],
        head_weights=weights,
        accumulation=options["accumulation"],
        num_sampled=options["sampled_softmax"],
        precision=options["precision"],
        patience=options["patience"],
        held_out_every=options["held_out_every"],
        checkpoint_every=options["checkpoint_every"],
        seed=options["seed"],
        self_generated=stage,
        ground_truth=_changed(
            settings.ground_truth, steps=options["text_steps"], batch_size=options["batch_size"]
        ),
    )


def _data(options: dict[str, Any]) -> Any:
    """Where the data is, ``None`` if none was named."""
    from hf_specdec.training.data_sources import DataChoice

    columns = {
        kind: options[f"{kind}_column"]
        for kind in ("messages", "prompt", "text")
        if options[f"{kind}_column"] is not None
    }
    if len(columns) > 1:
        given = ", ".join(f"--{kind}-column {name}" for kind, name in columns.items())
        raise ValueError(f"give one column, not {given}")
    if options["data"] is None:
        if columns:
            raise ValueError("a column was named, but no --data that has it")
        return None
    found: Any = next(iter(columns.items()), (None, None))
    kind, column = found
    return DataChoice(tuple(options["data"]), options["split"], column, kind)


def _changed(settings: Any, **values: Any) -> Any:
    """The settings with those values that are not ``None``."""
    return replace(settings, **{name: v for name, v in values.items() if v is not None})
