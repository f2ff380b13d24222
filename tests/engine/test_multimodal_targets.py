"""Prompts with images: run as the processor's inputs, then speculated on as text.

Where positions have axes for time, height and width, an image takes fewer positions than tokens;
a verifying forward that counted tokens would give another text. For Gemma 4 see its own tests.
"""

import pytest
import torch
from compiled_calls import Graphs
from multimodal_models import ALONG_AXES, SEEING, seeing_target, seen_prompts, seen_row
from tiny_models import ScriptedDrafter, sometimes_wrong

NEW = 10


def alone(target, inputs, **kwargs) -> list[list[int]]:
    """The reference: plain ``generate`` on every row alone."""
    texts = []
    for row in range(len(inputs["input_ids"])):
        prompt = seen_row(inputs, row)
        output = target.generate(**prompt, max_new_tokens=NEW, **kwargs)
        texts.append(output[0, prompt["input_ids"].shape[1] :].tolist())
    return texts


@pytest.mark.parametrize("name", SEEING)
def test_greedy_batches_with_images(name):
    target, inputs = seeing_target(name), seen_prompts(name)
    texts = alone(target, inputs, do_sample=False)
    # Of rows that advance together one draft in three that is wrong would leave next to nothing.
    wrong = sometimes_wrong if name != "qwen3_5" else lambda row, index: index == 4
    output = target.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
        assistant_model=ScriptedDrafter(texts, wrong), num_assistant_tokens=3,
    )  # fmt: skip
    width = inputs["input_ids"].shape[1]
    assert output.sequences[:, width:].tolist() == texts
    # The drafter knew most of the texts, and the target said so.
    assert output.speculation.mean_acceptance_length > 1.3
    with torch.no_grad():
        logits = target(**inputs).logits[:, -1]
        other = target(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits[:, -1]
    assert not torch.allclose(logits, other), "what nobody looks at tests nothing"


@pytest.mark.parametrize("name", ALONG_AXES)
def test_rows_that_finish_early_and_the_cache_they_leave(name):
    # Rows move into the gaps, and their axes with them.
    target, inputs = seeing_target(name), seen_prompts(name)
    texts = alone(target, inputs, do_sample=False)
    end = texts[0][4]
    expected = [text[: text.index(end) + 1] if end in text else text for text in texts]
    assert len({len(text) for text in expected}) > 1
    output = target.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=end,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
    )  # fmt: skip
    width = inputs["input_ids"].shape[1]
    for row, text in zip(output[:, width:].tolist(), expected, strict=True):
        assert row[: len(text)] == text


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_sampled_texts_depend_on_no_draft_and_no_neighbour(name, make_speculator):
    target, inputs = seeing_target(name), seen_prompts(name)
    settings = {"max_new_tokens": NEW, "do_sample": True, "top_k": 8}
    width = inputs["input_ids"].shape[1]
    together = [
        target.generate(
            **inputs, **settings, row_seeds=[4, 5, 6], num_assistant_tokens=k,
            assistant_model=make_speculator(),
        )[:, width:].tolist()
        for k in (0, 3)
    ]  # fmt: skip
    assert together[0] == together[1]
    for row in range(3):
        inputs_of_row = seen_row(inputs, row)
        text = target.generate(
            **inputs_of_row, **settings, row_seeds=[4 + row], assistant_model=make_speculator()
        )
        assert text[0, inputs_of_row["input_ids"].shape[1] :].tolist() == together[0][row]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_text_alone_between_calls_with_images(name, prompts, make_speculator):
    # The model keeps what its last call with images left (rope_deltas).
    target, inputs, text = seeing_target(name), seen_prompts(name), prompts(3)
    settings = {"max_new_tokens": NEW, "do_sample": False}
    plain = target.generate(**text, **settings)
    target.generate(**inputs, **settings, assistant_model=make_speculator())
    assert torch.equal(target.generate(**text, **settings), plain)
    target.generate(**inputs, **settings)
    ours = target.generate(**text, **settings, assistant_model=make_speculator())
    assert torch.equal(ours, plain)


def test_prompt_lookup_and_trees_with_images(make_speculator):
    target, inputs = seeing_target("qwen2_vl"), seen_prompts("qwen2_vl")
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for settings in ({"prompt_lookup_num_tokens": 4}, {"num_tree_nodes": 5}):
        ours = target.generate(
            **inputs, max_new_tokens=NEW, do_sample=False,
            assistant_model=make_speculator(top_k_tokens_per_head=[3] * 4), **settings,
        )  # fmt: skip
        assert torch.equal(ours, plain), settings


def test_static_shapes_with_images():
    # Of two rows the first leaves, and the second takes its place with the axes it has.
    target, inputs = seeing_target("qwen2_vl"), seen_prompts("qwen2_vl", 2)
    texts = alone(target, inputs, do_sample=False)
    end = next(token for token in texts[0] if token not in texts[1])
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": end}
    plain = target.generate(**inputs, **settings)
    graphs = Graphs()
    ours = target.generate(
        **inputs, **settings, **graphs.arguments, num_assistant_tokens=1,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
    )  # fmt: skip
    assert torch.equal(ours, plain) and len(graphs)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_the_next_turn_of_a_talk_about_an_image(name, make_speculator):
    from transformers import DynamicCache

    target, inputs = seeing_target(name), seen_row(seen_prompts(name), 0)
    turn = torch.randint(3, 50, (1, 5), generator=torch.Generator().manual_seed(9))

    def talk(**kwargs):
        cache = DynamicCache(config=target.config.get_text_config())
        settings = {"max_new_tokens": 8, "do_sample": False, **kwargs}
        first = target.generate(**inputs, past_key_values=cache, **settings)
        ids = torch.cat([first, turn], dim=1)
        return target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings
        )

    assert torch.equal(talk(assistant_model=make_speculator()), talk())
