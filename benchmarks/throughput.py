"""Throughput of the demo pair with and without speculation, paired in one run.

    python benchmarks/throughput.py                      # batch 1 and 8, K = 3
    python benchmarks/throughput.py --batch 1 --k 1 2 3 4 --repeats 3
    python benchmarks/throughput.py --batch 8 --schedule "[[1,3,3],[4,64,1]]"
    python benchmarks/throughput.py --target smollm2-mtp --drafter mtp --k 1 2 3

For every group of prompts plain ``generate`` and the same call with the drafter run one after the
other, so that both see the same machine (statistics come from another call before); the table gives
medians over groups and repeats. In bfloat16 the two texts can part at a near-tie (see
docs/exactness.md); every pair that parts is judged and counted. ``outside`` is the share of the
speculative call spent in neither target nor drafter, measured with hooks around their forwards in a
separate pass.
"""

import argparse
import json
import platform
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from prompts import CHAT
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.agreement import explain_difference
from hf_specdec.cli.demo_pair import load_demo_pair
from hf_specdec.drafters import MTPDrafter
from hf_specdec.registry import mtp_network


def load_pair(arguments, console):
    """Target, tokenizer and drafter: the demo pair, or what the arguments name."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.target is None:
        pair = load_demo_pair(dtype, torch.device("cpu"))
        target, tokenizer, drafter = pair.target, pair.tokenizer, pair.drafter
    else:
        target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        drafter = None
    if arguments.drafter == "mtp":
        # Of this class the clock can time the proposals.
        drafter = MTPDrafter(mtp_network(target))
    elif arguments.drafter is not None:
        drafter = AutoModel.from_pretrained(arguments.drafter, dtype=dtype).eval()
    if drafter is None:
        raise SystemExit("--drafter is needed together with --target")
    return target, tokenizer, drafter


def timed(call):
    """Seconds and result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def up_to_end(tokens, eos_token_id):
    """A row without the padding behind its end."""
    return tokens[: tokens.index(eos_token_id) + 1] if eos_token_id in tokens else tokens


@contextmanager
def clock(target, drafter):
    """Seconds spent in the target's forwards and in the drafter's proposals."""
    seconds = {"target": 0.0, "drafter": 0.0}
    started = []
    before = target.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))

    def after_forward(*_):
        seconds["target"] += time.perf_counter() - started.pop()

    after = target.register_forward_hook(after_forward)
    propose = drafter.propose

    def timed_propose(*args, **kwargs):
        elapsed, result = timed(lambda: propose(*args, **kwargs))
        seconds["drafter"] += elapsed
        return result

    drafter.propose = timed_propose
    try:
        yield seconds
    finally:
        before.remove()
        after.remove()
        del drafter.propose


def measure(target, tokenizer, drafter, batch, k, arguments, advance):
    """One line of the table."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in CHAT[: arguments.prompts]
    ]
    groups = [texts[i : i + batch] for i in range(0, len(texts) - batch + 1, batch)]
    common = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    plain_seconds, ours_seconds, ratios, shares = [], [], [], []
    stats = hf_specdec.SpeculationStats()
    compared = near_ties = wrong = 0
    for group in groups:
        inputs = tokenizer(
            group, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        width = inputs["input_ids"].shape[1]

        def plain(inputs=inputs):
            return target.generate(**inputs, **common)

        def ours(inputs=inputs, **extra):
            return target.generate(
                **inputs,
                **common,
                assistant_model=drafter,
                num_assistant_tokens=k,
                num_speculative_tokens_per_batch_size=arguments.schedule,
                **extra,
            )

        told = ours(return_dict_in_generate=True)
        our_count = told.speculation.num_new_tokens

        for repeat in range(arguments.repeats):
            seconds, reference = timed(plain)
            our_seconds, sequences = timed(ours)
            count = int((reference[:, width:] != tokenizer.pad_token_id).sum())
            plain_seconds.append(seconds / max(count, 1))
            ours_seconds.append(our_seconds / max(our_count, 1))
            ratios.append(plain_seconds[-1] / ours_seconds[-1])
            if repeat == 0:
                stats = stats + told.speculation
                for row in range(batch):
                    mask = inputs["attention_mask"][row].bool()
                    difference = explain_difference(
                        target,
                        inputs["input_ids"][row][mask][None],
                        up_to_end(reference[row, width:].tolist(), tokenizer.eos_token_id),
                        up_to_end(sequences[row, width:].tolist(), tokenizer.eos_token_id),
                    )
                    compared += 1
                    near_ties += difference is not None and difference.near_tie
                    wrong += difference is not None and not difference.near_tie
            advance()
        with clock(target, drafter) as seconds:
            total, _ = timed(ours)
        shares.append(1 - (seconds["target"] + seconds["drafter"]) / total)
    return {
        "batch": batch,
        "k": k,
        "schedule": arguments.schedule,
        "plain_tokens_per_second": 1 / statistics.median(plain_seconds),
        "speculative_tokens_per_second": 1 / statistics.median(ours_seconds),
        "speedup_median": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "per_position": stats.per_position,
        "outside_share_median": statistics.median(shares),
        "texts": compared,
        "texts_parted_at_a_near_tie": near_ties,
        "texts_wrong": wrong,
    }


def show(rows, console):
    """The measurements as a table."""
    table = Table(title="plain generate against speculation, paired")
    for name in (
        "batch", "K", "plain tok/s", "spec. tok/s", "speed-up", "MAL", "per position", "outside",
        "identical",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for r in rows:
        identical = r["texts"] - r["texts_parted_at_a_near_tie"] - r["texts_wrong"]
        note = f" (+{r['texts_parted_at_a_near_tie']} near-tie)" * bool(
            r["texts_parted_at_a_near_tie"]
        )
        note += f" {r['texts_wrong']} WRONG" * bool(r["texts_wrong"])
        table.add_row(
            str(r["batch"]),
            str(r["k"] if r["schedule"] is None else r["schedule"]),
            f"{r['plain_tokens_per_second']:.1f}",
            f"{r['speculative_tokens_per_second']:.1f}",
            f"{r['speedup_median']:.2f}x [{r['speedup_min']:.2f}-{r['speedup_max']:.2f}]",
            f"{r['mean_acceptance_length']:.2f}",
            " ".join(f"{p:.2f}" for p in r["per_position"]),
            f"{100 * r['outside_share_median']:.1f}%",
            f"{identical}/{r['texts']}{note}",
        )
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--k", type=int, nargs="+", default=[3])
    parser.add_argument("--schedule", type=json.loads, help="K by batch size: [[start,end,K],...]")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(CHAT))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--target", help="Hub id or folder; by default the demo's target")
    parser.add_argument(
        "--drafter",
        help="Hub id or folder, or mtp for the target's own MTP layers; by default the shipped one",
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console = Console()
    target, tokenizer, drafter = load_pair(arguments, console)
    warm_up = tokenizer(CHAT[0], return_tensors="pt")
    for extra in ({}, {"assistant_model": drafter}):
        target.generate(**warm_up, max_new_tokens=16, do_sample=False, **extra)
    rows = []
    cells = [(b, k) for b in arguments.batch for k in arguments.k]
    total = sum((arguments.prompts // b) * arguments.repeats for b, _ in cells)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=total)
        for batch, k in cells:
            rows.append(
                measure(
                    target, tokenizer, drafter, batch, k, arguments, lambda: progress.advance(task)
                )
            )
    show(rows, console)
    machine = {
        "dtype": arguments.dtype,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "new_tokens": arguments.new_tokens,
    }
    console.print(", ".join(f"{k}: {v}" for k, v in machine.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
