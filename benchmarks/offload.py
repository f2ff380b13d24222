"""Plain and speculative ``generate`` with the target's layers on a disk, and in memory beside it.

    python benchmarks/offload.py
    python benchmarks/offload.py --k 3 --prompts 5 --repeats 3

The demo pair, one row, greedy; ``--model tiny`` takes a random model of a Llama's form instead,
whose drafts are right by chance alone. The target is written to a folder and loaded with
``device_map`` and ``offload_folder``, as users do it: embedding and head in memory, all layers on
the disk, from which every forward fetches them. Files that were just written come from the
operating system's cache, so a real disk is slower, and a forward saved is worth more.
"""

import argparse
import tempfile

import torch
from paired import PLAIN, Way, measure, rows_of
from random_models import SHAPES, random_llama, random_speculator
from reporting import add_output_options, show, spread, write_json
from transformers import AutoModelForCausalLM

from hf_specdec.benchmarking import prompt_sets
from hf_specdec.benchmarking.workload import groups_of
from hf_specdec.cli.demo_pair import load_demo_pair

DEMO = "demo"
# Of any Llama; what isn't named here is nowhere.
IN_MEMORY = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
ON_DISK = "model.layers"
PROMPT_LENGTH = 32


def pair_of(options):
    """Target, drafter and prompts of one row."""
    dtype = getattr(torch, options.dtype)
    if options.model == DEMO:
        pair = load_demo_pair(dtype, torch.device("cpu"))
        texts = prompt_sets(["general"])["general"][: options.prompts]
        groups = groups_of(pair.tokenizer, texts, 1, torch.device("cpu"))
        return pair.target, pair.drafter, [group.inputs for group in groups]
    target = random_llama(options.model, dtype)
    drafter = random_speculator(target, options.k, min(1024, SHAPES[options.model][1]))
    generator = torch.Generator().manual_seed(0)
    size = (options.prompts, 1, PROMPT_LENGTH)
    ids = torch.randint(1, target.config.vocab_size, size, generator=generator)
    return target, drafter, [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


def on_disk(target, folder):
    """The target again, with its layers on the disk."""
    target.save_pretrained(f"{folder}/target")
    return AutoModelForCausalLM.from_pretrained(
        f"{folder}/target",
        dtype=target.dtype,
        device_map={**dict.fromkeys(IN_MEMORY, "cpu"), ON_DISK: "disk"},
        offload_folder=f"{folder}/offloaded",
    ).eval()


def ways_of(target, drafter, k):
    """Plain and speculative."""

    def plain(**inputs):
        return target.generate(**inputs, do_sample=False)

    def speculative(**inputs):
        return target.generate(
            **inputs, do_sample=False, assistant_model=drafter, num_assistant_tokens=k
        )

    return [
        Way(PLAIN, "transformers", plain),
        Way(f"with drafts, K={k}", "hf_specdec", speculative),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[DEMO, *SHAPES], default=DEMO)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--k", type=int, default=3, help="draft tokens a step")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1, help="of every prompt")
    add_output_options(parser, plot=False)
    options = parser.parse_args()
    target, drafter, prompts = pair_of(options)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = {"in memory": target, "layers on disk": on_disk(target, folder)}
        for place, model in places.items():
            ways = ways_of(model, drafter, options.k)
            found = measure(model, ways, prompts, options.new_tokens, options.repeats)
            for row, way in zip(rows_of(place, found), found, strict=True):
                rows.append({**row, "forwards": way.forwards, "tokens": way.tokens})
        del places, model, ways, found
    cells = [
        [
            *(row["section"], row["way"], str(row["forwards"]), str(row["tokens"])),
            *(f"{row['tokens_per_second']:.2f}", spread(row["to_plain"])),
            f"{row['identical']}/{len(prompts)}",
        ]
        for row in rows
    ]
    columns = ["target", "way", "forwards", "tokens", "tok/s", "to plain", "same text"]
    title = f"{options.model}, {options.dtype}, one row, {options.new_tokens} new tokens"
    show(title, columns, cells, options.markdown)
    write_json(options.json, rows, **vars(options))


if __name__ == "__main__":
    main()
