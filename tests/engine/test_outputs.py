"""What a call returns besides tokens: scores, logits, hidden states, attentions, as in generate."""

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, ScriptedDrafter, sometimes_wrong

NEW = 14
ALL: dict[str, Any] = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


@pytest.fixture
def eager(make_target):
    """``eager(family)``: the tiny target with attention that returns its weights."""
    switched = []

    def make(family):
        target = make_target(family)
        switched.append((target, target.config._attn_implementation))
        target.set_attn_implementation("eager")
        return target

    yield make
    for target, implementation in switched:
        target.set_attn_implementation(implementation)


def assert_same(ours, plain, lengths):
    """Equal shapes, and equal values as far as each row goes."""
    for name in ("scores", "logits"):
        a, b = getattr(ours, name), getattr(plain, name)
        assert len(a) == len(b) == max(lengths)
        for token, (x, y) in enumerate(zip(a, b, strict=True)):
            assert x.shape == y.shape and x.dtype == y.dtype == torch.float32
            for row, length in enumerate(lengths):
                if token < length:
                    torch.testing.assert_close(x[row], y[row], atol=2e-4, rtol=1e-4)
    for name in ("hidden_states", "attentions"):
        a, b = getattr(ours, name), getattr(plain, name)
        assert len(a) == len(b) == max(lengths)
        for token, (x, y) in enumerate(zip(a, b, strict=True)):
            assert len(x) == len(y)
            for layer, reference in zip(x, y, strict=True):
                assert layer.shape == reference.shape
                for row, length in enumerate(lengths):
                    if token < length:
                        torch.testing.assert_close(layer[row], reference[row], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_outputs_equal_those_of_plain_generate(family, batch, eager, prompts):
    target, inputs = eager(family), prompts(batch)
    common = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "repetition_penalty": 1.2,
        **ALL,
    }
    plain = target.generate(**inputs, **common)
    answers = plain.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    ours = target.generate(
        **inputs, **common, assistant_model=ScriptedDrafter(answers, sometimes_wrong, 3)
    )
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert 0 < ours.speculation.acceptance_rate < 1
    assert_same(ours, plain, [NEW] * batch)
    # The processed and the raw logits differ, or the test could not tell them apart.
    assert not torch.equal(ours.scores[0], ours.logits[0])


def test_rows_that_end_early_leave_zeros(eager, prompts):
    target, inputs = eager("llama"), prompts(3)
    width = inputs["input_ids"].shape[1]
    common = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": NEW}
    texts = target.generate(**inputs, **common).sequences[:, width:].tolist()
    eos = texts[1][4]
    common["eos_token_id"] = eos
    plain = target.generate(**inputs, **common, **ALL)
    lengths = [t.index(eos) + 1 if eos in t else NEW for t in texts]
    assert len(set(lengths)) > 1
    ours = target.generate(**inputs, **common, **ALL, assistant_model=ScriptedDrafter(texts))
    assert_same(ours, plain, lengths)
    row, length = min(enumerate(lengths), key=lambda pair: pair[1])
    assert not ours.scores[length][row].any()


def test_logits_without_processors_and_transition_scores(target, prompts):
    inputs = prompts(3)
    common = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    plain = target.generate(**inputs, **common)
    answers = plain.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    ours = target.generate(**inputs, **common, assistant_model=ScriptedDrafter(answers))
    a, b = (
        target.compute_transition_scores(o.sequences, o.scores, normalize_logits=True)
        for o in (ours, plain)
    )
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_sampled_scores_are_what_was_sampled_from(target, prompts):
    inputs = prompts(3)
    common = {
        "do_sample": True,
        "top_k": 4,
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_scores": True,
        "row_seeds": [1, 2, 3],
    }
    blind = ScriptedDrafter([[0]] * 3)
    slow = target.generate(**inputs, **common, assistant_model=blind, num_assistant_tokens=0)
    answers = slow.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    fast = target.generate(
        **inputs, **common, assistant_model=ScriptedDrafter(answers, sometimes_wrong)
    )
    for token, (a, b) in enumerate(zip(fast.scores, slow.scores, strict=True)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert ((a > -torch.inf).sum(-1) == 4).all()
        for row in range(3):
            assert a[row, answers[row][token]] > -torch.inf


def test_nothing_is_collected_without_a_dict(target, prompts):
    inputs = prompts(1)
    result = target.generate(
        **inputs, assistant_model=ScriptedDrafter([[0]]), num_assistant_tokens=0,
        max_new_tokens=4, output_scores=True,
    )  # fmt: skip
    assert isinstance(result, torch.Tensor)


def test_attentions_need_an_implementation_that_has_them(target, prompts):
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        target.generate(
            **prompts(1),
            assistant_model=ScriptedDrafter([[0]]),
            return_dict_in_generate=True,
            output_attentions=True,
        )
