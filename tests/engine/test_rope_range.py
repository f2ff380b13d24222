"""Texts longer than the trained length, for every kind of rotary embeddings."""

import functools
from typing import Any

import pytest
import torch
from tiny_models import _COMMON, PAD, ScriptedDrafter, row_by_row, sometimes_wrong
from transformers import DynamicCache, LlamaConfig, Phi3Config
from transformers.models.auto import AutoModelForCausalLM

TRAINED, SIZE = 16, 8
NEW = 14
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 4.0, **_FACTORS},
}


@functools.cache
def target_with(kind: str, phi: bool = False):
    """A tiny target that was trained on `TRAINED` tokens."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, **KINDS[kind]}
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = TRAINED
    longest = 4 * TRAINED if kind == "longrope" else TRAINED
    fields: dict[str, Any] = {
        **_COMMON,
        "max_position_embeddings": longest,
        "rope_parameters": rope,
    }
    config: Any
    if phi:
        config = Phi3Config(**fields, original_max_position_embeddings=TRAINED)
    else:
        config = LlamaConfig(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded random prompts."""
    generator = torch.Generator().manual_seed(3)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, 60, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def check_same_text(target, inputs, new: int = NEW) -> None:
    texts = row_by_row(target, inputs, max_new_tokens=new, do_sample=False)
    width = inputs["input_ids"].shape[1]
    output = target.generate(
        **inputs, max_new_tokens=new, do_sample=False, return_dict_in_generate=True,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
    )  # fmt: skip
    assert output.sequences[:, width:].tolist() == texts
    assert output.speculation.mean_acceptance_length > 1.2


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_frequencies_that_stay_reach_beyond_the_trained_length(kind):
    check_same_text(target_with(kind), batch(TRAINED - 4, TRAINED + 3, 5))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_within_the_trained_length(kind, make_speculator):
    # To its last token, beyond which the drafts of the last steps would look; twice, as a longer
    # call leaves its frequencies with the model.
    target = target_with(kind)
    check_same_text(target, batch(7, 5, 2), new=TRAINED - 7)
    target.generate(**batch(TRAINED + 9), max_new_tokens=2)
    check_same_text(target, batch(7, 5, 2), new=TRAINED - 7)


@pytest.mark.parametrize("phi", [False, True], ids=["llama", "phi3"])
def test_longrope_behind_its_switch(phi):
    check_same_text(target_with("longrope", phi), batch(TRAINED + 1, TRAINED + 5))


def refuse(target, inputs, match, make_speculator, **kwargs) -> None:
    forwards: list[int] = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=match):
            target.generate(
                **{"max_new_tokens": NEW, **inputs, **kwargs}, assistant_model=make_speculator()
            )
    finally:
        handle.remove()
    assert not forwards


def test_dynamic_beyond_the_trained_length(make_speculator):
    target = target_with("dynamic")
    match = r"'dynamic'.*max_position_embeddings=16.*can reach 19 tokens.*rope_type='yarn'"
    refuse(target, batch(5, 3), match, make_speculator)
    # Padding is no text: neither row gets further than the other.
    inputs = batch(TRAINED - 4, 3)
    refuse(target, inputs, "can reach 17 tokens", make_speculator, max_new_tokens=5)
    check_same_text(target, inputs, new=4)


@pytest.mark.parametrize("phi", [False, True], ids=["llama", "phi3"])
def test_longrope_across_its_switch(phi, make_speculator):
    target = target_with("longrope", phi)
    match = r"'longrope'.*16 tokens.*up to 5.*can reach 19.*max_new_tokens to at most 11"
    refuse(target, batch(5, 3), match, make_speculator)
    # Rows on both sides of it can't share a forward.
    match = r"up to 20 and this call can reach 34\. Call generate.*batches of prompts that are all"
    refuse(target, batch(20, 3), match, make_speculator)
    refuse(target, batch(20), match, make_speculator, prefill_chunk_size=8)


def test_longrope_from_a_cache_with_the_other_frequencies(make_speculator):
    target, inputs = target_with("longrope"), batch(20)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(inputs["input_ids"][:, :10], past_key_values=cache)
    refuse(target, inputs, "can reach 34", make_speculator, past_key_values=cache)
