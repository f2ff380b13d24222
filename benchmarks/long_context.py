"""What a step costs at a context of 128 tokens and at one of 4096: the loops compared.

    python benchmarks/long_context.py

A random model of a real shape goes on from a context of random keys and values. Measured are single
steps, from the end of one forward of the target to the end of the next, in three loops: plain
``generate``, this library's with K drafts, and transformers' assisted loop with the same drafter
(batch 1, as it takes no more). The drafter is synthetic, as good as asked for and without cost. All
loops take turns. transformers' caches append each step's keys with ``torch.cat``, which copies the
context; this library writes them in place. The bytes of keys and values that a step copies are
counted in a run apart.
"""

import argparse
import copy
import statistics

import torch
import transformers
from loops import transformers_alone, transformers_loop
from random_models import SHAPES, random_cache, random_llama
from reporting import OURS, THEIRS, add_output_options, show, write_json
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.benchmarking import SyntheticDrafter
from hf_specdec.benchmarking.steps import step_times
from hf_specdec.benchmarking.synthetic import settle

PLAIN, LIBRARY, TRANSFORMERS = "plain generate", "hf_specdec", "transformers, assisted"
# The first steps of a call meet cold caches.
SKIPPED = 2


class Scene:
    """A context, and the three ways to go on from it.

    Args:
        target: the model.
        rows: B.
        context: tokens in the cache when the first step begins, the newest one not counted.
        options: of the command line.
    """

    def __init__(self, target, rows, context, options):
        self.target, self.rows, self.context = target, rows, context
        self._k = options.k
        self._cache = random_cache(target, rows, context)
        generator = torch.Generator().manual_seed(options.seed)
        vocabulary = target.config.vocab_size
        self._ids = torch.randint(1, vocabulary, (rows, context + 1), generator=generator)
        # Enough for all steps to be over all rows: a step emits at most K + 1 tokens of a row.
        self._num_steps = options.steps
        steps = options.steps + SKIPPED
        self._tokens = {PLAIN: steps + 1, LIBRARY: steps * (self._k + 1) + 1}
        self._tokens[TRANSFORMERS] = self._tokens[LIBRARY]
        most = self._tokens[LIBRARY]
        answers = self._new(self._plain(most))
        self.drafter = SyntheticDrafter(
            answers, most + self._k, vocabulary, options.acceptance, self._k, options.seed
        )
        settle(self.drafter, lambda: self._new(self._ours(most)))

    @property
    def ways(self):
        """Names of the loops that can run here."""
        return [PLAIN, LIBRARY, *([TRANSFORMERS] if self.rows == 1 else [])]

    def run(self, way):
        """One call."""
        tokens = self._tokens[way]
        if way == PLAIN:
            return self._plain(tokens)
        return self._ours(tokens) if way == LIBRARY else self._theirs(tokens)

    def steps(self, way):
        """`Step`s of one call, the first ones left out, and tokens of the longest row per step."""
        drafter = None if way == PLAIN else self.drafter
        steps = step_times(self.target, lambda: self.run(way), drafter)
        # The prompt's forward gives the first token.
        emitted = self._tokens[way] - 1
        return steps[SKIPPED : SKIPPED + self._num_steps], emitted / len(steps)

    def _arguments(self, tokens):
        return {
            "inputs": self._ids,
            "attention_mask": torch.ones_like(self._ids),
            "cache": copy.deepcopy(self._cache),
            "max_new_tokens": tokens,
            "do_sample": False,
        }

    def _plain(self, tokens):
        with transformers_alone():
            return self.target.generate(**self._arguments(tokens))

    def _ours(self, tokens):
        return self.target.generate(
            **self._arguments(tokens), assistant_model=self.drafter, num_assistant_tokens=self._k
        )

    def _theirs(self, tokens):
        # Given all ids, its first forward would run those again that the cache holds.
        arguments = {**self._arguments(tokens), "inputs": self._ids[:, -1:]}
        return transformers_loop(self.target, self.drafter, **arguments)

    def _new(self, ids):
        return ids[:, self._ids.shape[1] :].tolist()


class CopiedKeys(TorchDispatchMode):
    """Counts the bytes of new tensors that look like a layer's keys or values.

    Views have no bytes of their own, and operators that write in place make no new tensor.

    Args:
        least: bytes of one layer's keys.
        width: of one head.
    """

    def __init__(self, least, width):
        super().__init__()
        self._least, self._width = least, width
        self.by_operator = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and self._width in result.shape[-2:]:
            size = result.numel() * result.element_size()
            inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
            is_new = all(result.data_ptr() != tensor.data_ptr() for tensor in inputs)
            if size >= self._least and is_new and not result._is_view():
                name = str(function)
                self.by_operator[name] = self.by_operator.get(name, 0) + size
        return result


def copied_keys(scene, way):
    """Bytes of keys and values that a step copies, by operator."""
    config = scene.target.config
    width = config.hidden_size // config.num_attention_heads
    slot = scene.rows * config.num_key_value_heads * width * scene.target.dtype.itemsize
    mode = CopiedKeys(scene.context * slot, width)
    # What was counted by the end of each forward; the first one is the prompt's.
    counts = []
    handle = scene.target.register_forward_hook(lambda *_: counts.append(dict(mode.by_operator)))
    try:
        with mode:
            scene.run(way)
    finally:
        handle.remove()
    first, last = counts[0], counts[-1]
    bytes_by_name = {name: (last[name] - first.get(name, 0)) / (len(counts) - 1) for name in last}
    return {name: size for name, size in bytes_by_name.items() if size}


def measure(target, options):
    """A row of numbers for each batch size, context and loop."""
    rows = []
    for batch in options.batch:
        scenes = [Scene(target, batch, context, options) for context in options.context]
        found = {(s.context, way): ([], []) for s in scenes for way in s.ways}
        for round_number in range(options.rounds):
            places = [(scene, way) for scene in scenes for way in scene.ways]
            for scene, way in reversed(places) if round_number % 2 else places:
                steps, per_step = scene.steps(way)
                found[scene.context, way][0].extend(steps)
                found[scene.context, way][1].append(per_step)
        for scene in scenes:
            for way in scene.ways:
                steps, per_step = found[scene.context, way]
                row = {"batch": batch, "context": scene.context, "way": way}
                for part in ("total", "target", "drafter", "loop"):
                    values = [1000 * getattr(step, part) for step in steps]
                    row[f"{part}_ms"] = statistics.median(values)
                row["tokens_per_step"] = statistics.mean(per_step)
                row["copied_bytes"] = copied_keys(scene, way)
                rows.append(row)
        del scenes
    return rows


def growth(rows):
    """By batch and loop: how a step and its parts grow from the first context to the last."""
    lines = []
    for batch, way in dict.fromkeys((row["batch"], row["way"]) for row in rows):
        of_way = [row for row in rows if (row["batch"], row["way"]) == (batch, way)]
        short, long = of_way[0], of_way[-1]
        lines.append(
            {
                "batch": batch,
                "way": way,
                "from": short["context"],
                "to": long["context"],
                "ratio": long["total_ms"] / short["total_ms"],
                "more_ms": long["total_ms"] - short["total_ms"],
                "more_target_ms": long["target_ms"] - short["target_ms"],
                "more_loop_ms": long["loop_ms"] - short["loop_ms"],
            }
        )
    return lines


def print_tables(rows, lines, as_markdown):
    columns = ["loop", "batch", "context", "a step, ms", "target", "drafter", "outside", "share"]
    columns += ["tokens a step", "keys copied, MB"]
    cells = [
        [
            row["way"], str(row["batch"]), str(row["context"]), f"{row['total_ms']:.2f}",
            f"{row['target_ms']:.2f}", f"{row['drafter_ms']:.2f}", f"{row['loop_ms']:.2f}",
            f"{100 * row['loop_ms'] / row['total_ms']:.1f} %", f"{row['tokens_per_step']:.2f}",
            f"{sum(row['copied_bytes'].values()) / 1e6:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    show("A step by context", columns, cells, as_markdown)
    columns = ["loop", "batch", "contexts", "grows", "by, ms", "in the target", "outside"]
    cells = [
        [
            line["way"], str(line["batch"]), f"{line['from']} to {line['to']}",
            f"{line['ratio']:.2f}x", f"{line['more_ms']:.2f}", f"{line['more_target_ms']:.2f}",
            f"{line['more_loop_ms']:.3f}",
        ]
        for line in lines
    ]  # fmt: skip
    show("From the shortest context to the longest", columns, cells, as_markdown)


def draw(rows, path):
    """A panel for each batch size: a line for each loop, dashed where transformers' assisted."""
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(row["batch"] for row in rows))
    figure = Figure(figsize=(4.4 * len(batches), 4), layout="constrained")
    looks = {PLAIN: ("0.4", "s"), LIBRARY: (OURS, "o"), TRANSFORMERS: (THEIRS, "^")}
    for axis, batch in zip(
        figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True
    ):
        for way, (colour, marker) in looks.items():
            of_way = [row for row in rows if (row["batch"], row["way"]) == (batch, way)]
            if of_way:
                contexts = [row["context"] for row in of_way]
                times = [row["total_ms"] for row in of_way]
                axis.plot(contexts, times, color=colour, marker=marker, label=way)
        axis.set_title(f"batch {batch}")
        axis.set_xlabel("tokens of context")
        axis.set_ylabel("a step, ms")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", color="0.9")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--synthetic-acceptance", dest="acceptance", type=float, default=0.7)
    parser.add_argument("--steps", type=int, default=16, help="of each call that are counted")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each loop, in turns")
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    transformers.logging.set_verbosity_error()
    target = random_llama(
        options.shape, getattr(torch, options.dtype), max_positions=2 * max(options.context) + 1024
    )
    rows = measure(target, options)
    lines = growth(rows)
    print_tables(rows, lines, options.markdown)
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "plot")}
    write_json(options.json, {"rows": rows, "growth": lines}, **settings)
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
