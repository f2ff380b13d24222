"""Drafters full of NaN or infinities: the output is the target's own, row by row."""

from typing import Any

import mtp_checkpoints
import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_target, without_eos
from tiny_models import VOCAB_SIZE

from hf_specdec.modeling.mtp import load_mtp

NEW, SEEDS = 12, [5, 6, 7]
POISONS = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "match": {"do_sample": True, "row_seeds": SEEDS},
    "auto": {"num_assistant_tokens": "auto"},
    "confidence": {"assistant_confidence_threshold": 0.4},
    "sampled, with confidence": {
        "do_sample": True, "row_seeds": SEEDS, "assistant_confidence_threshold": 0.4,
    },
    "lookup first": {"prompt_lookup_num_tokens": 3},
    "processors": {"repetition_penalty": 1.3},
    "tree": {"num_tree_nodes": 6},
    "sampled tree": {"num_tree_nodes": 6, "do_sample": True, "row_seeds": SEEDS},
    "the checkpoint's tree": {"speculative_token_tree": "checkpoint"},
}  # fmt: skip


def poison(model: Any, value: float, share: float = 1.0) -> None:
    """Put a value in place of so many weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight[torch.rand(weight.shape, generator=generator) < share] = value


def same_as_plain(target: Any, drafter: Any, inputs: dict[str, Any], call: dict[str, Any]) -> Any:
    """The statistics of a call whose text must be that of no drafts at all."""
    call = {"do_sample": False, "max_new_tokens": NEW, **call}
    weights = [w.clone() for w in target.parameters()]
    extra = {
        "num_assistant_tokens", "assistant_confidence_threshold", "num_tree_nodes",
        "speculative_token_tree", "prompt_lookup_num_tokens",
    }  # fmt: skip
    plain = {name: value for name, value in call.items() if name not in extra}
    if plain["do_sample"]:
        plain |= {"assistant_model": drafter, "num_assistant_tokens": 0}
    expected = target.generate(**inputs, **plain)
    output = target.generate(
        **inputs, **call, assistant_model=drafter, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected.tolist()
    assert all(torch.equal(a, b) for a, b in zip(weights, target.parameters(), strict=True))
    return output.speculation


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", POISONS)
def test_a_speculator(target, make_speculator, prompts, value, call):
    speculator = make_speculator()
    poison(speculator, POISONS[value])
    stats = same_as_plain(target, speculator, prompts(3), CALLS[call])
    assert stats.num_new_tokens == 3 * NEW


@pytest.mark.parametrize("call", ["greedy", "match", "tree"])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_a_speculator_with_some(target, make_speculator, prompts, share, call):
    speculator = make_speculator(draft_vocab_size=24)
    poison(speculator, float("nan"), share)
    same_as_plain(target, speculator, prompts(3), CALLS[call])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_vocabulary_in_half_precision(make_speculator, dtype):
    """Where the largest logit is found block by block, from its bits."""
    speculator = make_speculator(vocab_size=40_000, n_predict=2).to(dtype)
    poison(speculator, float("nan"))
    drafts = speculator.propose(torch.randn(2, 32, dtype=dtype), torch.tensor([1, 2]), 2, None)
    assert drafts.min() >= 0 and drafts.max() < 40_000


@pytest.mark.parametrize("value", POISONS)
def test_rejection_keeps_the_distribution(target, make_speculator, value):
    """Every draft is rejected, and the target's own row is what is sampled from."""
    speculator = make_speculator()
    poison(speculator, POISONS[value])
    draws = 1200
    ids = torch.tensor([[5, 6, 7]]).expand(draws, -1)
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=True, top_k=0,
        temperature=3.0, verification="rejection", num_assistant_tokens=1,
        assistant_model=speculator, return_dict_in_generate=True,
    )  # fmt: skip
    assert output.speculation.num_accepted_tokens == 0
    with torch.no_grad():
        logits = target(output.sequences[:, :-1]).logits[:, -1]
    mean = (logits / 3.0).softmax(-1).sum(0)
    observed = torch.bincount(output.sequences[:, -1], minlength=VOCAB_SIZE).float()
    common = mean > 5
    chi2 = ((observed - mean)[common] ** 2 / mean[common]).sum() / common.sum()
    assert 0.5 < chi2 < 1.7, chi2


@pytest.mark.parametrize("call", ["greedy", "match", "auto", "confidence"])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_mtp_layers(prompts, family, call):
    target = without_eos(mtp_checkpoints.load(family))
    network = load_mtp(target)
    poison(network, float("nan"))
    same_as_plain(target, network, prompts(3), CALLS[call])


@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.parametrize("call", ["greedy", "match", "auto"])
def test_gemma4_assistants(prompts, call, centroids):
    target = gemma4_target("31B")
    assistant = gemma4_assistant(target, centroids)
    poison(assistant, float("nan"))
    same_as_plain(target, assistant, prompts(3), CALLS[call])
