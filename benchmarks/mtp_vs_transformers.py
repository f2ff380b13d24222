"""MTP here against transformers' own ``use_mtp=True``, on the same weights, paired in one run.

    python benchmarks/mtp_vs_transformers.py
    python benchmarks/mtp_vs_transformers.py --hidden 512 --layers 8 --steps 0   # larger, random

A GLM-4.5-MoE of a few layers is trained on this repository's text for a minute, its MTP layer with
it, and saved in the published layout. Every prompt is then continued by plain ``generate``, by
transformers' loop and by this library's, one after the other. transformers reads the MTP weights in
every call; this library once, when they are attached or first used. First calls are those of a
freshly loaded target, here with and without ``attach`` before. Batches are measured against plain
``generate``, as transformers refuses them.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

import hf_specdec
from hf_specdec.modeling.mtp import MTPModel, family_of

ROOT = Path(__file__).parents[1]
VOCABULARY = 256
LENGTH = 128


def text_of_the_repository():
    """Bytes of the documentation and the sources, int64."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("hf_specdec/*.py")])
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def new_pair(arguments):
    """A target and its MTP module with random weights."""
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        moe_intermediate_size=arguments.hidden // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=arguments.hidden // 8,
        n_routed_experts=arguments.experts,
        num_experts_per_tok=4,
        num_nextn_predict_layers=1,
        max_position_embeddings=4096,
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
    )
    target = Glm4MoeForCausalLM(config)
    network = MTPModel(target, family_of(config), num_modules=1)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    for buffer in network.buffers():
        buffer.data.zero_()
    return target, network


def train(target, network, data, arguments):
    """Next token and, by the MTP module, the one after it."""
    optimizer = torch.optim.AdamW([*target.parameters(), *network.parameters()], lr=2e-3)
    states = []
    handle = target.model.norm.register_forward_hook(lambda _m, _a, output: states.append(output))
    positions = torch.arange(LENGTH)[None].expand(8, -1)
    causal = torch.full((LENGTH, LENGTH), torch.finfo().min).triu(1)[None, None]
    for step in track(range(arguments.steps), description="training"):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, 2 * (1 - step / arguments.steps))
        start = torch.randint(0, len(data) - LENGTH - 2, (8,))
        ids = data[start[:, None] + torch.arange(LENGTH + 2)]
        states.clear()
        logits = target(input_ids=ids[:, :LENGTH]).logits
        embeds = network.embed(ids[:, 1 : LENGTH + 1], positions)
        ahead = network.logits(network(states[0], embeds, positions, {"full_attention": causal}))
        loss = sum(
            torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())
            for x, y in ((logits, ids[:, 1 : LENGTH + 1]), (ahead, ids[:, 2:]))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    handle.remove()


def save(target, network, folder):
    """In the published layout: the MTP module is the decoder layer behind the last one."""
    target.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    prefix = f"model.layers.{target.config.num_hidden_layers}."
    names = (
        ("embedding_norm.0.", "enorm."),
        ("hidden_norm.0.", "hnorm."),
        ("projection.0.", "eh_proj."),
        ("final_norm.0.", "shared_head.norm."),
        ("blocks.0.0.", ""),
    )
    for name, tensor in network.state_dict().items():
        ((ours, published),) = (pair for pair in names if name.startswith(pair[0]))
        key = prefix + published + name.removeprefix(ours)
        if ".mlp.experts." in key:
            weights |= one_by_one(key, tensor)
        else:
            weights[key] = tensor.contiguous()
    save_file(weights, file, {"format": "pt"})


def one_by_one(key, experts):
    """Experts are published one by one; transformers' layers hold them joined."""
    prefix, _, name = key.rpartition(".")
    parts = {name: experts}
    if name == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), experts.chunk(2, dim=1), strict=True))
    return {
        f"{prefix}.{i}.{part}.weight": tensor[i].contiguous()
        for part, tensor in parts.items()
        for i in range(len(tensor))
    }


def load(folder):
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # transformers knows the layer numbers of the published models only.
    layer = target.config.num_hidden_layers
    target._keys_to_ignore_on_load_unexpected = [rf"layers\.{layer}\."]
    return target


def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def theirs(target, ids, **kwargs):
    """transformers' own loop: the library's seams are closed meanwhile."""
    hf_specdec.disable()
    try:
        return target.generate(ids, use_mtp=True, **kwargs)
    finally:
        hf_specdec.enable()


def ours(target, ids, **kwargs):
    return target.generate(ids, use_mtp=True, **kwargs)


def plain(target, ids, **kwargs):
    return target.generate(ids, **kwargs)


def first_calls(folder, prompt, common, repeats):
    """Seconds of first calls, medians, each on a freshly loaded target."""
    seconds = {"theirs": [], "ours": [], "attach": [], "ours_attached": []}
    for _ in range(repeats):
        for name, way in (("theirs", theirs), ("ours", ours), ("ours_attached", plain)):
            target = load(folder)
            plain(target, prompt, **{**common, "max_new_tokens": 4})
            if name == "ours_attached":
                elapsed, _ = timed(lambda t=target: hf_specdec.attach(t, {"method": "mtp"}))
                seconds["attach"].append(elapsed)
            elapsed, _ = timed(lambda way=way, target=target: way(target, prompt, **common))
            seconds[name].append(elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}


def later_calls(target, prompts, common, repeats):
    """Seconds of later calls for every way, and whether the texts are identical."""
    seconds = {plain: [], theirs: [], ours: []}
    identical = 0
    for way in seconds:
        way(target, prompts[0], **common)
    for _ in range(repeats):
        for prompt in prompts:
            texts = []
            for way, times in seconds.items():
                elapsed, text = timed(lambda way=way, p=prompt: way(target, p, **common))
                times.append(elapsed)
                texts.append(text.tolist())
            identical += texts[0] == texts[1] == texts[2]
    return {way.__name__: times for way, times in seconds.items()}, identical


def batches(target, prompts, common, repeats):
    """Ratios of plain to speculative seconds for all prompts at once."""
    together = torch.cat(prompts)
    ratios = []
    for _ in range(repeats + 1):
        slow, reference = timed(lambda: plain(target, together, **common))
        fast, result = timed(lambda: ours(target, together, **common))
        assert reference.tolist() == result.tolist()
        ratios.append(slow / fast)
    try:
        theirs(target, together, **common)
        refused = False
    except ValueError:
        refused = True
    return ratios[1:], refused


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100, help="of training; 0 leaves it random")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    data = text_of_the_repository()
    target, network = new_pair(arguments)
    train(target, network, data, arguments)
    starts = torch.linspace(0, len(data) - 65, arguments.prompts).long().tolist()
    prompts = [data[start : start + 64][None] for start in starts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(target.eval(), network.eval(), folder)
        rows = [measure(folder, prompts, length, arguments) for length in arguments.new_tokens]
    numbers = {
        "parameters": sum(p.numel() for p in target.parameters()),
        "mtp_parameters": sum(p.numel() for p in network.parameters()),
        "rows": rows,
        "machine": {
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    show(rows, Console())
    print(numbers["parameters"], numbers["mtp_parameters"], numbers["machine"])
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


def measure(folder, prompts, new_tokens, arguments):
    """One line of the table."""
    common = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
    first = first_calls(folder, prompts[0], common, arguments.repeats)
    target = load(folder)
    stats = hf_specdec.SpeculationStats()
    for prompt in prompts:
        stats += ours(target, prompt, **common, return_dict_in_generate=True).speculation
    later, identical = later_calls(target, prompts, common, arguments.repeats)
    ratios, refused = batches(target, prompts, common, arguments.repeats)
    return {
        "new_tokens": new_tokens,
        "first_call_seconds": first,
        "later_tokens_per_second": {
            way: new_tokens / statistics.median(times) for way, times in later.items()
        },
        "later_ratio_to_transformers": statistics.median(
            a / b for a, b in zip(later["theirs"], later["ours"], strict=True)
        ),
        "later_ratio_to_plain": statistics.median(
            a / b for a, b in zip(later["plain"], later["ours"], strict=True)
        ),
        "identical": f"{identical}/{len(later['ours'])}",
        "batch": len(prompts),
        "batch_ratio_to_plain": statistics.median(ratios),
        "batch_refused_by_transformers": refused,
        "acceptance": stats.per_position,
    }


def show(rows, console):
    """The measurements as a table."""
    table = Table(title="MTP on the same weights: this library against transformers' use_mtp=True")
    for column in (
        "new tokens", "first call", "first, attached", "later calls", "later, to plain",
        f"batch {rows[0]['batch']}, to plain", "identical", "acceptance",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        first = row["first_call_seconds"]
        table.add_row(
            str(row["new_tokens"]),
            f"{first['theirs'] / first['ours']:.2f}x",
            f"{first['theirs'] / first['ours_attached']:.2f}x",
            f"{row['later_ratio_to_transformers']:.2f}x",
            f"{row['later_ratio_to_plain']:.2f}x",
            f"{row['batch_ratio_to_plain']:.2f}x",
            row["identical"],
            f"{row['acceptance'][0]:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
