"""Random targets, drafters, prompts and settings: always the tokens of plain generate.

Five hundred cases, the same ones every time. For as many new ones as wished:

    pytest -m exhaustive tests/engine/test_properties.py    # HF_SPECDEC_CASES=20000
"""

import functools
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_lockstep import CONFIGS as HYBRIDS
from tiny_models import CONFIGS, HIDDEN_SIZE, PAD, VOCAB_SIZE, ScriptedDrafter
from transformers import AutoModelForCausalLM, DynamicCache

from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.targets import lockstep

# torch has no grouped matmul for experts in float64.
_WITH_EXPERTS = {"bailing_hybrid", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next"}
FAMILIES = {k: v for k, v in {**CONFIGS, **HYBRIDS}.items() if k not in _WITH_EXPERTS}
PENALTIES: dict[str, st.SearchStrategy] = {
    "repetition_penalty": st.sampled_from([0.7, 1.3, 2.0]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": st.lists(
        st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=2), min_size=1, max_size=9
    ),
    "suppress_tokens": st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=20),
    "min_new_tokens": st.integers(1, 9),
    "encoder_repetition_penalty": st.just(1.6),
}
FILTERS: dict[str, st.SearchStrategy] = {
    "temperature": st.sampled_from([0.3, 1.0, 2.5]),
    "top_k": st.integers(1, 20),
    "top_p": st.sampled_from([0.2, 0.7, 1.0]),
    "min_p": st.sampled_from([0.01, 0.3]),
}


@functools.cache
def target_of(family: str, seed: int):
    """A random target, in float64 so that forwards over one and many tokens agree."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval().double()
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def speculator_of(seed: int) -> MLPSpeculatorPreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = MLPSpeculatorConfig(
            vocab_size=VOCAB_SIZE, emb_dim=HIDDEN_SIZE, inner_dim=16, n_predict=4
        )
        return MLPSpeculatorPreTrainedModel(config).eval().double()


@st.composite
def cases(draw) -> dict[str, Any]:
    """Everything about one call."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    few = {name: draw(s) for name, s in PENALTIES.items() if draw(st.integers(0, 5)) == 0}
    if draw(st.integers(0, 2)):
        few = {}
    generation: dict[str, Any] = {"max_new_tokens": draw(st.integers(1, 16)), **few}
    if draw(st.booleans()):
        generation["eos_token_id"] = draw(
            st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=9, unique=True)
        )
    if draw(st.integers(0, 3)) == 0:
        generation["prefill_chunk_size"] = draw(st.integers(1, 9))
    do_sample = draw(st.booleans())
    if do_sample:
        generation |= {name: draw(s) for name, s in FILTERS.items() if draw(st.booleans())}
        generation.setdefault("top_k", 0)
    ours: dict[str, Any] = {"num_assistant_tokens": draw(st.integers(0, 4))}
    if draw(st.integers(0, 3)) == 0:
        ours["num_assistant_tokens_schedule"] = draw(
            st.sampled_from(["heuristic", "heuristic_transient"])
        )
    if draw(st.integers(0, 3)) == 0:
        ours["num_speculative_tokens_per_batch_size"] = [
            [1, 1, draw(st.integers(0, 4))],
            [2, 9, draw(st.integers(0, 4))],
        ]
    return {
        "family": family,
        "seed": draw(st.integers(0, 2)),
        "lengths": lengths,
        "prompt_seed": draw(st.integers(0, 999)),
        "generation": {**generation, "do_sample": do_sample},
        "ours": ours,
        "scripted": draw(st.booleans()),
        "wrong": draw(st.integers(0, 10)),
        "two_turns": draw(st.integers(0, 3)) == 0,
    }


def prompts_of(case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(case["prompt_seed"])
    width = max(case["lengths"])
    ids = torch.full((len(case["lengths"]), width), PAD)
    for row, length in enumerate(case["lengths"]):
        ids[row, width - length :] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def drafter_of(case, answers):
    """A random speculator, or one that knows the answers but is wrong in some tenths of cases."""
    if not case["scripted"]:
        return speculator_of(case["seed"])

    def wrong(row: int, index: int) -> bool:
        return (row * 7919 + index * 104729 + case["prompt_seed"]) % 10 < case["wrong"]

    return ScriptedDrafter(answers, wrong, 4)


def check(case) -> None:
    """One case: speculation against plain generation (greedy), or against K = 0 (sampled)."""
    target, inputs = target_of(case["family"], case["seed"]), prompts_of(case)
    rows, width = inputs["input_ids"].shape
    common = dict(case["generation"])
    ours = dict(case["ours"])
    reference_only: dict[str, Any] = {}
    if common["do_sample"]:
        common["row_seeds"] = list(range(rows))
        blind = ScriptedDrafter([[0]] * rows)
        reference_only = {"assistant_model": blind, "num_assistant_tokens": 0}
    reference = target.generate(**inputs, **common, **reference_only)
    answers = reference[:, width:].tolist()
    recurrent = case["family"] in lockstep.MODEL_TYPES
    if case["two_turns"] and not (recurrent and rows > 1):
        event("with a cache")
        ours["cache"] = DynamicCache(config=target.config.get_text_config())
    result = target.generate(**inputs, **common, **ours, assistant_model=drafter_of(case, answers))
    assert result.tolist() == reference.tolist()
    if "cache" not in ours or common["do_sample"] or "eos_token_id" in common:
        return
    # Turn 2, from the cache that turn 1 filled: plain and speculative continuations agree.
    assert ours["cache"].get_seq_length() == result.shape[1] - 1
    more = torch.randint(3, VOCAB_SIZE, (rows, 3), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([result, more], dim=1)
    ones = torch.ones_like(ids[:, width:])
    mask = torch.cat([inputs["attention_mask"], ones], dim=1)
    again = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    expected = target.generate(ids, **again)
    second = target.generate(
        ids,
        **again,
        cache=ours["cache"],
        assistant_model=drafter_of(case, expected[:, ids.shape[1] :].tolist()),
    )
    assert second.tolist() == expected.tolist()


_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=250, derandomize=True, **_SETTINGS)
@given(cases())
def test_always_the_tokens_of_plain_generate(case):
    check(case)


@pytest.mark.exhaustive
@settings(max_examples=int(os.environ.get("HF_SPECDEC_CASES", "5000")), **_SETTINGS)
@given(cases())
def test_and_for_as_long_as_one_likes(case):
    check(case)
