"""Gemma 4 (and 3n) as targets, shared layers included: drafts never change a token."""

import pytest
import torch
from gemma4_models import TARGETS, WINDOW, gemma4_target
from tiny_models import PAD, VOCAB_SIZE, ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong

NEW = 24


def prompts_of(length: int, rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(5))
    for row in range(1, rows):
        ids[row, : (3 * row) % length] = PAD
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def check(target, inputs, **kwargs):
    rows = len(inputs["input_ids"])
    expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
    assert max(len(set(row)) for row in expected) > 4, "a text without variety tests nothing"
    for k in (1, 4):
        drafter = ScriptedDrafter(expected, sometimes_wrong, k)
        output = target.generate(
            **inputs, assistant_model=drafter, max_new_tokens=NEW, do_sample=False,
            return_dict_in_generate=True, **kwargs,
        )  # fmt: skip
        assert new_tokens(output.sequences, inputs, [NEW] * rows) == expected
        assert 0.2 < output.speculation.acceptance_rate < 0.9


@pytest.mark.parametrize("length", [WINDOW - 3, WINDOW, WINDOW + 1, 30])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_change_nothing(name, rows, length):
    check(gemma4_target(name), prompts_of(length, rows))


@pytest.mark.parametrize("name", ["E2B", "12B"])
def test_a_prompt_in_chunks(name):
    check(gemma4_target(name), prompts_of(29, 3), prefill_chunk_size=5)


@pytest.mark.parametrize("name", ["E2B", "31B", "3n"])
def test_a_cache_goes_on_from_turn_to_turn(name):
    target, inputs = gemma4_target(name), prompts_of(20, 1)
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    answer = plain[:, 20:].tolist()
    first = target.generate(
        **inputs, assistant_model=ScriptedDrafter(answer, sometimes_wrong), max_new_tokens=15,
        do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    ids = first.sequences
    rest = [answer[0][15:]]
    second = target.generate(
        ids, attention_mask=torch.ones_like(ids), cache=first.cache, max_new_tokens=15,
        assistant_model=ScriptedDrafter(rest, sometimes_wrong), do_sample=False,
    )  # fmt: skip
    assert torch.equal(second, plain)


def test_attentions_of_shared_layers_have_their_window():
    target, inputs = gemma4_target("E2B"), prompts_of(12, 1)
    target.set_attn_implementation("eager")
    try:
        wanted = {
            "do_sample": False,
            "max_new_tokens": 6,
            "output_attentions": True,
            "return_dict_in_generate": True,
        }
        plain = target.generate(**inputs, **wanted)
        drafter = ScriptedDrafter(plain.sequences[:, 12:].tolist(), sometimes_wrong, 2)
        output = target.generate(**inputs, **wanted, assistant_model=drafter)
    finally:
        target.set_attn_implementation("sdpa")
    for ours, theirs in zip(output.attentions, plain.attentions, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
