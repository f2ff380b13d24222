"""Sampling with a Gemma 4 assistant: this library and transformers' own path, against the truth.

    python benchmarks/gemma4_sampling.py

A random target with 12 tokens and a random assistant for it continue one prompt again and again.
The joint distribution of the first two new tokens is known exactly, so that the number of times
each pair comes up can be tested (chi-square). transformers drafts the most likely tokens and
verifies them as if they had been sampled from their softmax, which lets too many of them through.
It takes one row at a time, so that its 6,000 samples are as many calls; here they are one batch.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from scipy.stats import chisquare
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

import hf_specdec

VOCABULARY = 12
PROMPT = torch.tensor([[3, 5, 7, 4]])
DRAFT = 2


def text_config(hidden_size, layers, **fields):
    """A Gemma 4 decoder with sliding and full layers."""
    return Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=8,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
        **fields,
    )


def new_pair():
    """Target and assistant with random weights."""
    target = Gemma4ForCausalLM(text_config(32, 4, tie_word_embeddings=False)).eval()
    config = Gemma4AssistantConfig(
        text_config=text_config(16, 2, num_kv_shared_layers=2), backbone_hidden_size=32
    )
    assistant = Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = DRAFT
    return target, assistant


def joint_probabilities(target):
    """By pair of tokens, from two plain forwards."""
    first = target(PROMPT).logits[0, -1].double().softmax(-1)
    ids = torch.cat([PROMPT.repeat(VOCABULARY, 1), torch.arange(VOCABULARY)[:, None]], dim=1)
    second = target(ids).logits[:, -1].double().softmax(-1)
    return {
        (a, b): float(first[a] * second[a, b]) for a in range(VOCABULARY) for b in range(VOCABULARY)
    }


def sample(target, rows, **kwargs):
    """Pairs of new tokens of ``rows`` texts; the third token gives the second a draft behind it."""
    ids = PROMPT.repeat(rows, 1)
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=DRAFT + 1,
        **kwargs,
    )
    start = PROMPT.shape[1]
    return [tuple(row) for row in output[:, start : start + 2].tolist()]


def compare(pairs, joint):
    """Total variation, chi-square per degree of freedom, and the p-value."""
    counts, total = Counter(pairs), len(pairs)
    variation = sum(abs(counts[pair] / total - p) for pair, p in joint.items()) / 2
    common = [pair for pair, p in joint.items() if p * total >= 5]
    observed = [counts[pair] for pair in common]
    expected = [joint[pair] * total for pair in common]
    # Rare pairs go into one cell, as the test needs a few expected hits in each.
    if len(common) < len(joint):
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    result = chisquare(observed, expected, sum_check=False)
    freedom = len(observed) - 1
    return {
        "total_variation": round(variation, 4),
        "chi2_per_df": round(float(result.statistic) / freedom, 3),
        "p_value": float(result.pvalue),
    }


def main():
    """Print a row for each way, and write them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    target, assistant = new_pair()
    samples = arguments.samples

    def transformers_own():
        hf_specdec.disable()
        try:
            calls = range(samples)
            return [sample(target, 1, assistant_model=assistant)[0] for _ in calls]
        finally:
            hf_specdec.enable()

    ways = {
        "plain sampling": lambda: sample(target, samples),
        "hf_specdec": lambda: sample(target, samples, assistant_model=assistant),
        "hf_specdec, rejection": lambda: sample(
            target, samples, assistant_model=assistant, verification="rejection"
        ),
        "transformers": transformers_own,
    }
    results = {}
    with torch.no_grad():
        joint = joint_probabilities(target)
        for name, run in ways.items():
            start = time.perf_counter()
            results[name] = compare(run(), joint)
            row = results[name]
            print(
                f"{name:<22} total variation {row['total_variation']:.3f}   chi2/df "
                f"{row['chi2_per_df']:7.2f}   p {row['p_value']:.2g}   "
                f"{time.perf_counter() - start:.0f} s"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
