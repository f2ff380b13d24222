"""`hf-specdec generate`: options and checks; the work is in `hf_specdec.cli.generate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_specdec.cli import options
from hf_specdec.cli import sampling as sampling_options
from hf_specdec.cli import spread as spread_options
from hf_specdec.cli.prompt_files import PromptItem, items_of, read_items, split_lines

Prompts = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", help="Texts; without any, lines of standard input."),
]
Input = Annotated[
    Path | None,
    typer.Option(
        metavar="JSONL",
        help='Prompts from a file, an object a line; "-": standard input.',
    ),
]
Field = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of the file's prompts (default: messages or prompt)."),
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="JSONL", help="Save texts and statistics; run again to continue."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Begin the output anew, whatever is there.")
]
Chat = Annotated[bool, typer.Option(help="Use the chat template of a target that has one.")]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System message of every chat without one.")
]
Stream = Annotated[
    bool | None, typer.Option(help="Print while generating (default: for single prompts).")
]
MarkAccepted = Annotated[
    bool, typer.Option("--mark-accepted", help="Print accepted draft tokens in green.")
]
LogStats = Annotated[
    bool, typer.Option("--log-stats", help="Print acceptance every 10 s and at the end.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens behind each prompt.")]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Prompts at once.")]


def generate(
    target: options.Target,
    prompts: Prompts = None,
    input: Input = None,
    field: Field = None,
    output: Output = None,
    overwrite: Overwrite = False,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: BatchSize = 1,
    chat: Chat = True,
    system: System = None,
    stream: Stream = None,
    mark_accepted: MarkAccepted = False,
    log_stats: LogStats = False,
    temperature: sampling_options.Temperature = None,
    top_p: sampling_options.TopP = None,
    top_k: sampling_options.TopK = None,
    min_p: sampling_options.MinP = None,
    seed: sampling_options.Seed = None,
    speculative_config: options.SpeculativeConfigJson = None,
    spec_method: options.SpecMethod = None,
    spec_model: options.SpecModel = None,
    spec_tokens: options.SpecTokens = None,
    tree_nodes: options.TreeNodes = None,
    lookup: options.Lookup = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: spread_options.DeviceMap = None,
    max_memory: spread_options.MaxMemory = None,
    offload_folder: spread_options.OffloadFolder = None,
    pack_weights: options.PackWeights = False,
    compiles: options.Compile = False,
) -> None:
    """Generate texts behind prompts, with or without a drafter.

    Under `accelerate launch -m hf_specdec generate ...` the processes share the prompts.

    \b
    Examples:
      hf-specdec generate demo "Why is the sky blue?" --mark-accepted
      hf-specdec generate TARGET --spec-method mtp < prompts.txt
      hf-specdec generate TARGET --spec-model DRAFTER --input prompts.jsonl --output texts.jsonl \\
        --batch-size 8 --temperature 0.7 --top-p 0.9 --seed 1
    """
    pair = options.pair_settings(
        target,
        speculative_config,
        spec_method,
        spec_model,
        spec_tokens,
        dtype,
        device,
        pack_weights,
        compiles,
        tree_nodes,
        lookup,
        spread_options.spread(
            device_map, max_memory, offload_folder, device, compiles, pack_weights
        ),
    )
    speculates = pair.speculative_config is not None
    sampling = sampling_options.sampling(temperature, top_p, top_k, min_p, seed)
    stream = _streams(stream, batch_size, output)
    _check(mark_accepted, log_stats, overwrite, stream, output, speculates)
    from hf_specdec.cli.generate import GenerateSettings, run_generate

    settings = GenerateSettings(
        pair=pair,
        items=_items(prompts, input, field),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        sampling=sampling,
        chat=chat,
        system=system,
        output=output,
        overwrite=overwrite,
        stream=stream,
        mark_accepted=mark_accepted,
        log_stats=log_stats,
    )
    run_generate(settings, Console(), Console(stderr=True))


def _items(prompts: list[str] | None, path: Path | None, field: str | None) -> list[PromptItem]:
    """The prompts, from where they were given."""
    if path is None and field is not None:
        raise typer.BadParameter(
            f"{field} would be a field of --input, which isn't given", param_hint="--field"
        )
    if path is not None:
        if prompts:
            raise typer.BadParameter(
                f"prompts come from {path} or from the arguments, not from both",
                param_hint="--input",
            )
        if str(path) == "-":
            return read_items(sys.stdin, "standard input", field)
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {path}", param_hint="--input")
        try:
            with open(path, encoding="utf-8") as file:
                return read_items(file, str(path), field)
        except UnicodeDecodeError as error:
            raise typer.BadParameter(
                f"{path} is not UTF-8 ({error}); convert it", param_hint="--input"
            ) from None
    if prompts:
        return items_of(prompts)
    lines = () if sys.stdin.isatty() else split_lines(sys.stdin.read())
    if not lines:
        raise typer.BadParameter(
            "there is none: give texts behind the target, lines on standard input, or --input",
            param_hint="PROMPT",
        )
    return items_of(lines)


def _streams(stream: bool | None, batch_size: int, output: Path | None) -> bool:
    """Whether texts are printed as they come."""
    possible = batch_size == 1 and output is None
    if stream and not possible:
        raise typer.BadParameter(
            "texts are printed as they come one at a time: leave out --batch-size and --output",
            param_hint="--stream",
        )
    return possible if stream is None else stream


def _check(
    mark_accepted: bool,
    log_stats: bool,
    overwrite: bool,
    stream: bool,
    output: Path | None,
    speculates: bool,
) -> None:
    """Refuse options that would change nothing."""
    if mark_accepted and not (stream and speculates):
        raise typer.BadParameter(
            "drafts are marked in texts that are printed as they come: with a drafter, "
            "--batch-size 1, and without --output",
            param_hint="--mark-accepted",
        )
    if log_stats and not speculates:
        raise typer.BadParameter(
            "there is no drafter; name one (--spec-model, --spec-method)", param_hint="--log-stats"
        )
    if overwrite and output is None:
        raise typer.BadParameter("there is no --output to begin anew", param_hint="--overwrite")
