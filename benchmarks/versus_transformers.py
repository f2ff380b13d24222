"""This library against transformers' own speculative loops, on the same weights.

    python benchmarks/versus_transformers.py --plot versus.png
    python benchmarks/versus_transformers.py --sections demo --limit 2 --new-tokens 32

All ways of a section take turns on the same prompts, one at a time, as transformers' loops take no
batches; greedy. Every text is compared with plain ``generate``'s. "Ours ahead" is, over the pairs
of runs, how much faster the way of this library is that stands beside transformers'.

demo        SmolLM2-135M-Instruct: the shipped MLP speculator, beside prompt lookup and a draft
            model. No trained draft model of this tokenizer is at hand: the target's first layers,
            with an output head fitted to them (benchmarks/draft_model.py), guess little, so that
            row says something about such a copy, not about draft models. ``--draft-model`` takes
            a better one.
draft       A random Llama whose text a small draft model knows at times, by construction
            (benchmarks/random_models.py): through ``assistant_model`` in transformers, and as a
            drafter in this library's loop.
mtp         A small GLM-4.5-MoE trained on this repository's text for a minute, and its MTP layer:
            ``use_mtp=True`` in both. transformers reads the layer's weights in every call.
gemma4      A random Gemma 4 and an assistant made like the pair of ``draft``.

"Same drafter" rows run one and the same drafter of this library in both loops: the loop alone.
"""

import argparse
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

import mtp_vs_transformers as mtp_pair
import torch
import transformers
from draft_model import DraftModelDrafter, fitted_draft_model
from loops import transformers_alone, transformers_loop
from paired import PLAIN, Way, measure, rows_of
from random_models import gemma4_pair, llama_pair
from reporting import OURS, THEIRS, add_output_options, show, spread, write_json
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM

from hf_specdec.benchmarking import prompt_sets
from hf_specdec.benchmarking.workload import groups_of
from hf_specdec.cli.demo_pair import load_demo_pair
from hf_specdec.registry import drafter_for, mtp_network

SECTIONS = ("demo", "draft", "mtp", "gemma4")
K = 3
FITTED_LAYERS, FITTED_TEXTS, FITTED_LENGTH = 2, 64, 96
# Where a synthetic pair's acceptance is like that of a good real one.
NOISE = {"draft": 2.0, "gemma4": 1.2}


def in_transformers(target, **options):
    """A way to generate that the library has no part in."""

    def run(**kwargs):
        with transformers_alone():
            return target.generate(**kwargs, **options, do_sample=False)

    return run


def in_library(target, **options):
    return partial(target.generate, **options, do_sample=False)


def in_their_loop(target, drafter):
    """A drafter of this library in transformers' loop."""
    return partial(transformers_loop, target, drafter, do_sample=False)


def plain_way(target):
    return Way(PLAIN, "transformers", in_transformers(target))


def draft_model_settings(model):
    """K tokens a step, whatever was accepted and however sure the draft model is."""
    config = model.generation_config
    config.num_assistant_tokens = K
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0


def demo_ways(target, speculator, draft_model, early_exit=None):
    """Prompt lookup, a draft model, and the MLP speculator with every K."""
    most = speculator.config.n_predict
    best = f"MLP speculator, K={most}"
    draft_model_settings(draft_model)
    ways = [
        plain_way(target),
        *(
            Way(
                f"prompt lookup, {n} tokens",
                "transformers",
                in_transformers(target, prompt_lookup_num_tokens=n),
                best,
            )
            for n in (3, 10)
        ),
        Way(
            f"draft model, K={K}",
            "transformers",
            in_transformers(target, assistant_model=draft_model),
            best,
        ),
    ]
    if early_exit:
        run = in_transformers(target, assistant_early_exit=early_exit)
        ways.append(Way(f"early exit behind layer {early_exit}", "transformers", run, best))
    drafter = drafter_for(speculator)
    ways.append(
        Way(f"same drafter, K={most}", "transformers", in_their_loop(target, drafter), best)
    )
    for k in (*range(1, most + 1), "auto"):
        run = in_library(target, assistant_model=speculator, num_assistant_tokens=k)
        ways.append(Way(f"MLP speculator, K={k}", "hf_specdec", run))
    return ways


def draft_ways(target, draft_model):
    """One draft model in both loops."""
    draft_model_settings(draft_model)
    ours = f"the draft model as a drafter, K={K}"
    return [
        plain_way(target),
        Way(
            f"assistant_model, K={K}",
            "transformers",
            in_transformers(target, assistant_model=draft_model),
            ours,
        ),
        Way(
            ours,
            "hf_specdec",
            in_library(target, assistant_model=DraftModelDrafter(draft_model, K)),
        ),
    ]


def mtp_ways(target):
    """The target's own MTP layer in both."""
    drafter = drafter_for(mtp_network(target))
    return [
        plain_way(target),
        Way("use_mtp=True", "transformers", in_transformers(target, use_mtp=True), "MTP, K=1"),
        Way("same drafter, K=1", "transformers", in_their_loop(target, drafter), "MTP, K=1"),
        Way("MTP, K=1", "hf_specdec", in_library(target, use_mtp=True)),
    ]


def gemma4_ways(target, assistant):
    """Its assistant in both, with every K."""
    # Read at the beginning of every call.
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    name = f"Gemma 4 assistant, K={K}"
    drafter = drafter_for(assistant)
    ours = [
        Way(
            f"Gemma 4 assistant, K={k}",
            "hf_specdec",
            in_library(target, assistant_model=assistant, num_assistant_tokens=k),
        )
        for k in range(1, K + 1)
    ]
    theirs = in_transformers(target, assistant_model=assistant)
    return [
        plain_way(target),
        Way(f"assistant_model, K={K}", "transformers", theirs, name),
        Way(f"same drafter, K={K}", "transformers", in_their_loop(target, drafter), name),
        *ours,
    ]


def random_prompts(vocabulary, count, length=64):
    """Rows of ids."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (count, 1, length), generator=generator)
    return [as_inputs(row) for row in ids]


def as_inputs(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def demo_section(options):
    pair = load_demo_pair(getattr(torch, options.dtype), torch.device("cpu"))
    target = pair.target
    if options.draft_model:
        draft = AutoModelForCausalLM.from_pretrained(options.draft_model, dtype=target.dtype)
    else:
        text = "".join(
            file.read_text(encoding="utf-8") for file in sorted(mtp_pair.ROOT.glob("docs/*.md"))
        )
        ids = torch.tensor(pair.tokenizer(text)["input_ids"][: FITTED_TEXTS * FITTED_LENGTH])
        ids = ids[: len(ids) // FITTED_LENGTH * FITTED_LENGTH].view(-1, FITTED_LENGTH)
        draft = fitted_draft_model(target, FITTED_LAYERS, ids)
    prompts = prompt_sets([options.set])[options.set][: options.limit]
    groups = groups_of(pair.tokenizer, prompts, 1, target.device)
    ways = demo_ways(target, pair.drafter, draft.eval(), options.early_exit)
    return target, ways, [group.inputs for group in groups]


def draft_section(options):
    dtype = getattr(torch, options.dtype)
    target, draft = llama_pair(
        dtype, options.layers, options.hidden, options.vocabulary, NOISE["draft"]
    )
    return target, draft_ways(target, draft), random_prompts(options.vocabulary, options.limit)


def mtp_section(options):
    """The pair of benchmarks/mtp_vs_transformers.py, in float32."""
    shape = Namespace(
        hidden=options.mtp_hidden, layers=options.mtp_layers, experts=options.mtp_experts,
        steps=options.mtp_steps,
    )  # fmt: skip
    torch.manual_seed(0)
    data = mtp_pair.text_of_the_repository()
    target, network = mtp_pair.new_pair(shape)
    mtp_pair.train(target, network, data, shape)
    folder = Path(options.scratch) / "mtp"
    mtp_pair.save(target.eval(), network.eval(), folder)
    target = mtp_pair.load(folder)
    target.generation_config.pad_token_id = 0
    starts = torch.linspace(0, len(data) - 65, options.limit).long().tolist()
    prompts = [as_inputs(data[start : start + 64][None]) for start in starts]
    return target, mtp_ways(target), prompts


def gemma4_section(options):
    dtype = getattr(torch, options.dtype)
    target, assistant = gemma4_pair(
        dtype, options.layers, options.hidden, options.vocabulary, NOISE["gemma4"]
    )
    return target, gemma4_ways(target, assistant), random_prompts(options.vocabulary, options.limit)


MAKERS = {
    "demo": demo_section,
    "draft": draft_section,
    "mtp": mtp_section,
    "gemma4": gemma4_section,
}


def run(options):
    """The rows of all sections."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as options.scratch,
        # Without a thread that would take time from what is measured.
        Progress(console=Console(stderr=True), auto_refresh=False, transient=True) as progress,
    ):
        for section in options.sections:
            task = progress.add_task(section, total=options.limit * options.repeats)
            target, ways, prompts = MAKERS[section](options)

            def advance(task=task):
                progress.advance(task)
                progress.refresh()

            found = measure(target, ways, prompts, options.new_tokens, options.repeats, advance)
            rows += rows_of(section, found)
            del target, ways
    return rows


def print_table(rows, as_markdown):
    columns = ["section", "way", "whose", "tok/s", "to plain", "tokens a forward", "ours ahead"]
    columns += ["identical/tie/wrong"]
    cells = [
        [
            row["section"], row["way"], row["whose"], f"{row['tokens_per_second']:.1f}",
            spread(row["to_plain"]), f"{row['tokens_per_forward']:.2f}",
            spread(row["ours_ahead"]) if row["ours_ahead"] else "",
            f"{row['identical']}/{row['near_ties']}/{row['wrong']}",
        ]
        for row in rows
    ]  # fmt: skip
    show("Against transformers' own loops, one prompt at a time", columns, cells, as_markdown)


def draw(rows, path):
    """Bars: how many times as fast as plain, a panel for each section."""
    from matplotlib.figure import Figure

    sections = list(dict.fromkeys(row["section"] for row in rows))
    groups = [
        [row for row in rows if row["section"] == name and row["way"] != PLAIN] for name in sections
    ]
    figure = Figure(figsize=(7, 0.9 * len(groups) + 0.28 * len(rows)), layout="constrained")
    heights = [len(group) for group in groups]
    axes = figure.subplots(
        len(groups), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axis, name, group in zip(axes, sections, groups, strict=True):
        values = [row["to_plain"][0] for row in group]
        colours = [OURS if row["whose"] == "hf_specdec" else THEIRS for row in group]
        bars = axis.barh([row["way"] for row in group], values, color=colours)
        axis.bar_label(bars, fmt=" %.2fx", fontsize="small")
        axis.axvline(1, color="0.4", linewidth=1, linestyle="--")
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_title(name, loc="left", fontsize="medium")
    axes[-1].set_xlabel("speed-up (blue: hf_specdec, orange: transformers)")
    figure.savefig(path, dpi=150)


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--limit", type=int, default=6, help="prompts of each section")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--set", default="general", help="prompts of the demo")
    parser.add_argument("--draft-model", metavar="FOLDER", help="a draft model for the demo")
    parser.add_argument("--early-exit", type=int, metavar="N", help="assistant_early_exit, too")
    parser.add_argument("--layers", type=int, default=12, help="of the random targets")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--mtp-hidden", type=int, default=128)
    parser.add_argument("--mtp-layers", type=int, default=10)
    parser.add_argument("--mtp-experts", type=int, default=256)
    parser.add_argument("--mtp-steps", type=int, default=100, help="of training; 0: random")
    add_output_options(parser)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = run(options)
    print_table(rows, options.markdown)
    left_out = ("json", "plot", "markdown", "scratch", "draft_model")
    settings = {key: value for key, value in vars(options).items() if key not in left_out}
    write_json(options.json, rows, **settings)
    if options.plot:
        draw(rows, options.plot)
    if any(row["wrong"] for row in rows):
        raise SystemExit("some texts are wrong")


if __name__ == "__main__":
    main()
