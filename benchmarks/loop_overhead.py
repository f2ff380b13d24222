"""What share of a step lies outside of target and drafter, and which operators run there.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --models demo --batch 1 --top 20

On the demo pair, and on a random model of a 1B Llama's shape with a random MLP speculator. Steps
are timed undisturbed, plain ``generate``'s beside ours in turns; the operators come from further
calls under torch's profiler, which slows them down: their counts are exact, their times an upper
bound. What is outside and in no operator is Python and the calls' own cost.
"""

import argparse
import statistics
from bisect import bisect_right
from collections import defaultdict

import torch
import transformers
from loops import transformers_alone
from random_models import SHAPES, random_llama, random_speculator
from reporting import OURS, THEIRS, add_output_options, show, write_json
from torch.profiler import ProfilerActivity, profile, record_function

from hf_specdec.benchmarking import prompt_sets
from hf_specdec.benchmarking.clock import wrapped_methods
from hf_specdec.benchmarking.steps import step_times
from hf_specdec.benchmarking.workload import groups_of
from hf_specdec.cli.demo_pair import load_demo_pair
from hf_specdec.registry import drafter_for

DEMO = "demo"
TARGET, DRAFTER = "target's forward", "drafter's method"
DRAFTING = ("observe", "propose", "keep_rows")
# The first steps of a call meet cold caches.
SKIPPED = 2
PROMPT_LENGTH = 32


class Pair:
    """A target, its drafter and prompts.

    Args:
        name: ``"demo"`` or one of the `SHAPES`.
        options: of the command line.
    """

    def __init__(self, name, options):
        dtype = getattr(torch, options.dtype)
        self._options = options
        self.name = name
        self._tokenizer = None
        if name == DEMO:
            pair = load_demo_pair(dtype, torch.device("cpu"))
            self.target, assistant, self._tokenizer = pair.target, pair.drafter, pair.tokenizer
        else:
            self.target = random_llama(name, dtype)
            assistant = random_speculator(self.target, options.k, min(1024, SHAPES[name][1]))
        self.drafter = drafter_for(assistant)

    def inputs(self, rows):
        """A left-padded batch."""
        if self._tokenizer is not None:
            prompts = prompt_sets(["general"])["general"]
            return groups_of(self._tokenizer, prompts, rows, self.target.device)[0].inputs
        generator = torch.Generator().manual_seed(rows)
        size = (rows, PROMPT_LENGTH)
        ids = torch.randint(1, self.target.config.vocab_size, size, generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def call(self, inputs, speculative):
        """Generate; long enough that no row ends, or drafts less, during the steps that count."""
        steps = SKIPPED + self._options.steps
        k = self._options.k if speculative else 0
        # Random heads are right by chance alone.
        per_step = k + 1 if self.name == DEMO else 1
        arguments = {
            **inputs,
            "max_new_tokens": steps * per_step + 2 * (k + 1),
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        if speculative:
            return self.target.generate(
                **arguments, assistant_model=self.drafter, num_assistant_tokens=k
            )
        with transformers_alone():
            return self.target.generate(**arguments)

    def steps(self, inputs, speculative):
        """The `Step`s that count."""
        drafter = self.drafter if speculative else None
        steps = step_times(self.target, lambda: self.call(inputs, speculative), drafter)
        return steps[SKIPPED : SKIPPED + self._options.steps]


def outside_operators(pair, inputs, steps):
    """Operators of a speculative step that run in neither network: by name count and microseconds.

    An operator's time is its own, without the operators that it calls.
    """
    opened = []

    def begin(*_):
        opened.append(record_function(TARGET))
        opened[-1].__enter__()

    def end(*_):
        opened.pop().__exit__(None, None, None)

    def wrapped(method):
        def drafting(*args, **kwargs):
            with record_function(DRAFTER):
                return method(*args, **kwargs)

        return drafting

    target = pair.target
    hooks = [target.register_forward_pre_hook(begin), target.register_forward_hook(end)]
    try:
        with (
            wrapped_methods(pair.drafter, DRAFTING, wrapped),
            profile(activities=[ProfilerActivity.CPU]) as profiler,
        ):
            pair.call(inputs, speculative=True)
    finally:
        for hook in hooks:
            hook.remove()
    return _outside(profiler.events(), steps)


def _outside(events, most):
    """By name: calls per step, and microseconds of the median step, of ``most`` steps."""
    forwards = sorted(
        (e.time_range for e in events if e.name == TARGET), key=lambda span: span.start
    )
    # A step begins behind a forward and reaches to the next.
    starts = [span.end for span in forwards[SKIPPED : SKIPPED + most + 1]]
    steps = len(starts) - 1
    calls, times = defaultdict(int), defaultdict(lambda: [0.0] * steps)
    for event in events:
        step = bisect_right(starts, event.time_range.start) - 1
        if 0 <= step < steps and not _in_network(event):
            calls[event.name] += 1
            times[event.name][step] += event.self_cpu_time_total
    rows = [
        {
            "operator": name,
            "calls": calls[name] / steps,
            "microseconds": statistics.median(times[name]),
        }
        for name in calls
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])


def _in_network(event):
    while event is not None:
        if event.name in (TARGET, DRAFTER):
            return True
        event = event.cpu_parent
    return False


def measure(pair, batch, options):
    """The numbers of one pair and batch size."""
    inputs = pair.inputs(batch)
    steps = {True: [], False: []}
    for speculative in steps:
        pair.call(inputs, speculative)
    for round_number in range(options.rounds):
        for speculative in (True, False) if round_number % 2 else (False, True):
            steps[speculative].extend(pair.steps(inputs, speculative))
    row = {"model": pair.name, "batch": batch}
    for speculative, prefix in ((True, ""), (False, "plain_")):
        for part in ("total", "target", "drafter", "loop"):
            values = [1000 * getattr(step, part) for step in steps[speculative]]
            row[f"{prefix}{part}_ms"] = statistics.median(values)
        shares = [step.loop / step.total for step in steps[speculative]]
        row[f"{prefix}share"] = statistics.median(shares)
    row["operators"] = outside_operators(pair, inputs, options.steps)
    row["operator_calls"] = sum(r["calls"] for r in row["operators"])
    row["operator_ms"] = sum(r["microseconds"] for r in row["operators"]) / 1000
    return row


def print_tables(rows, top, as_markdown):
    columns = ["model", "batch", "a step, ms", "target", "drafter", "outside", "share"]
    columns += ["plain: outside", "share", "operators outside"]
    cells = [
        [
            row["model"], str(row["batch"]), f"{row['total_ms']:.2f}", f"{row['target_ms']:.2f}",
            f"{row['drafter_ms']:.2f}", f"{row['loop_ms']:.3f}", f"{100 * row['share']:.2f} %",
            f"{row['plain_loop_ms']:.3f}", f"{100 * row['plain_share']:.2f} %",
            f"{row['operator_calls']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    for row in rows:
        operators = [
            [r["operator"], f"{r['calls']:.1f}", f"{r['microseconds']:.1f}"]
            for r in row["operators"][:top]
        ]
        title = (
            f"{row['model']}, batch {row['batch']}: operators outside of both networks, per step "
            f"({row['operator_calls']:.0f} calls, {row['operator_ms']:.2f} ms under the profiler)"
        )
        show(title, ["operator", "calls", "us"], operators, as_markdown)
    show("A step's time outside of target and drafter, medians", columns, cells, as_markdown)


def draw(rows, path):
    """Bars: the share outside, ours and plain generate's, with the goal of 2 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.8 * len(rows) + 2, 3.6), layout="constrained")
    axis = figure.subplots()
    places = range(len(rows))
    for shift, key, colour, label in (
        (-0.2, "share", OURS, "hf_specdec"),
        (0.2, "plain_share", THEIRS, "plain generate"),
    ):
        heights = [100 * row[key] for row in rows]
        bars = axis.bar([p + shift for p in places], heights, 0.38, color=colour, label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize="small")
    axis.axhline(2, color="0.4", linewidth=1, linestyle="--")
    axis.set_xticks(places, [f"{row['model']}\nbatch {row['batch']}" for row in rows])
    axis.set_ylabel("% of a step outside the networks")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = [DEMO, *SHAPES]
    parser.add_argument("--models", nargs="+", choices=models, default=[DEMO, "llama-1b"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of each call that are counted")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each loop, in turns")
    parser.add_argument("--top", type=int, default=12, help="operators in each table")
    add_output_options(parser)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    transformers.logging.set_verbosity_error()
    rows = []
    for name in options.models:
        pair = Pair(name, options)
        rows += [measure(pair, batch, options) for batch in options.batch]
        del pair
    print_tables(rows, options.top, options.markdown)
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "plot")}
    write_json(options.json, rows, **settings)
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
