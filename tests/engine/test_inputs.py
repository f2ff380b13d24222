"""Ways to hand in a prompt: embeddings, chunks, missing masks, odd lengths, several sequences."""

from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    ScriptedDrafter,
    new_tokens,
    row_by_row,
    sometimes_wrong,
)

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


def scripted(rows, k=3):
    return ScriptedDrafter(rows, sometimes_wrong, k)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_embeds(family, batch, with_ids, make_target, prompts):
    target, inputs = make_target(family), prompts(batch)
    answers = row_by_row(target, inputs, **GREEDY)
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    arguments = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"], **GREEDY}
    if with_ids:
        arguments["input_ids"] = inputs["input_ids"]
    plain = target.generate(**arguments)
    ours = target.generate(**arguments, assistant_model=scripted(answers))
    assert ours.tolist() == plain.tolist()
    if not with_ids:
        assert ours.tolist() == answers


def test_embeddings_and_ids_are_sampled_alike(target, prompts, make_speculator):
    # The noise hangs on positions, and these are the same.
    inputs = prompts(3)
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    common = {
        "attention_mask": inputs["attention_mask"],
        "assistant_model": make_speculator(),
        "do_sample": True,
        "row_seeds": [1, 2, 3],
        "max_new_tokens": NEW,
    }
    from_ids = target.generate(inputs["input_ids"], **common)
    from_embeds = target.generate(inputs_embeds=embeds, **common)
    assert from_embeds.tolist() == from_ids[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks(family, chunk, make_target, count_forwards):
    target = make_target(family)
    ids = torch.randint(3, VOCAB_SIZE, (3, 21), generator=torch.Generator().manual_seed(1))
    ids[0, :5] = 0
    mask = (ids != 0).long()
    answers = row_by_row(target, {"input_ids": ids, "attention_mask": mask}, **GREEDY)
    with count_forwards(target) as lengths:
        ours = target.generate(
            ids,
            attention_mask=mask,
            prefill_chunk_size=chunk,
            assistant_model=scripted(answers),
            **GREEDY,
        )
    assert ours[:, 21:].tolist() == answers
    chunks = [min(chunk, 21 - start) for start in range(0, 21, chunk)]
    assert lengths[: len(chunks)] == chunks


@pytest.mark.parametrize("value", [0, -3, 2.5, True])
def test_a_chunk_size_that_is_none(value, target, prompts):
    with pytest.raises(ValueError, match="prefill_chunk_size="):
        target.generate(
            **prompts(1), prefill_chunk_size=value, assistant_model=ScriptedDrafter([[0]]), **GREEDY
        )


def test_chunks_of_something_else(target, prompts):
    from hf_specdec.call.compatibility import check_chunks

    with pytest.raises(ValueError, match=r"can't split \['pixel_values'\]"):
        check_chunks(4, {"pixel_values": torch.zeros(1), "attention_mask": None})


def test_no_mask_and_a_pad_token(target, prompts):
    inputs = prompts(3)
    answers = row_by_row(target, inputs, **GREEDY)
    result = target.generate(inputs["input_ids"], assistant_model=scripted(answers), **GREEDY)
    assert new_tokens(result, inputs, [NEW] * 3) == answers


def test_no_mask_and_no_pad_token(target, prompts):
    inputs = prompts(1)
    answers = row_by_row(target, inputs, **GREEDY)
    config = target.generation_config
    pad, config.pad_token_id = config.pad_token_id, None
    try:
        result = target.generate(inputs["input_ids"], assistant_model=scripted(answers), **GREEDY)
    finally:
        config.pad_token_id = pad
    assert new_tokens(result, inputs, [NEW]) == answers


@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_one_token_and_longer_than_the_window(family, length, make_target):
    target = make_target(family)
    ids = torch.randint(3, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    answers = row_by_row(target, inputs, **GREEDY)
    result = target.generate(**inputs, assistant_model=scripted(answers), **GREEDY)
    assert new_tokens(result, inputs, [NEW] * 2) == answers


def test_holes_in_the_middle_of_a_prompt(target):
    ids = torch.randint(3, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, 4:7] = 0
    mask[1, :2] = 0
    mask[1, 8] = 0
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    assert plain.tolist() != target.generate(ids, **GREEDY).tolist()
    result = target.generate(
        ids, attention_mask=mask, assistant_model=scripted(plain[:, 12:].tolist()), **GREEDY
    )
    assert result.tolist() == plain.tolist()


def test_given_position_ids(target):
    ids = torch.randint(3, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(9) * 2 + torch.tensor([[0], [5]])
    common = {"attention_mask": torch.ones_like(ids), "position_ids": positions, **GREEDY}
    plain = target.generate(ids, **common)
    assert plain.tolist() != target.generate(ids, **GREEDY).tolist()
    result = target.generate(ids, **common, assistant_model=scripted(plain[:, 9:].tolist()))
    assert result.tolist() == plain.tolist()


@pytest.mark.parametrize("k", [0, 3])
def test_num_return_sequences(k, target, prompts, make_speculator):
    inputs = prompts(2)
    seeds = list(range(10, 16))
    common = {"do_sample": True, "max_new_tokens": NEW, "assistant_model": make_speculator()}
    several = target.generate(
        **inputs, **common, num_return_sequences=3, row_seeds=seeds, num_assistant_tokens=k
    )
    repeated = {name: value.repeat_interleave(3, dim=0) for name, value in inputs.items()}
    each = target.generate(**repeated, **common, row_seeds=seeds)
    assert several.tolist() == each.tolist()
    assert len({tuple(row) for row in several.tolist()}) == 6
