"""Greedy output equals plain ``generate`` on each prompt alone, token for token, in float32."""

import pytest
import torch
from tiny_models import EOS, FAMILIES, PAD, ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong

NEW = 24
BATCHES = [1, 3, 8]


def speculate(target, inputs, drafter, num_new=NEW, **kwargs):
    return target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        **kwargs,
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_random_speculator_changes_nothing(
        self, family, batch, make_target, make_speculator, prompts
    ):
        target, inputs = make_target(family), prompts(batch)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        assert max(len(set(row)) for row in expected) > 4, "a text without variety tests nothing"
        for k in (1, 4):
            output = speculate(
                target, inputs, make_speculator(), num_assistant_tokens=k, do_sample=False
            )
            assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
            assert output.speculation.acceptance_rate < 0.5

    def test_half_right_drafts_change_nothing(self, family, batch, make_target, prompts):
        # Rows advance by different numbers of tokens: the ragged case.
        target, inputs = make_target(family), prompts(batch)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        for k in (1, 3):
            drafter = ScriptedDrafter(expected, sometimes_wrong, k)
            output = speculate(target, inputs, drafter, do_sample=False)
            assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
            assert 0.2 < output.speculation.acceptance_rate < 0.9

    def test_perfect_drafts_need_the_predicted_forwards(
        self, family, batch, make_target, prompts, count_forwards
    ):
        target, inputs = make_target(family), prompts(batch)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        for k in (1, 3):
            with count_forwards(target) as lengths:
                output = speculate(
                    target, inputs, ScriptedDrafter(expected, num_draft_tokens=k), do_sample=False
                )
            assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
            # One token from the prefill, then K + 1 from every forward.
            steps = -(-(NEW - 1) // (k + 1))
            assert len(lengths) == output.speculation.num_target_forwards == 1 + steps
            assert output.speculation.acceptance_rate == 1.0


class TestStopping:
    def eos_at(self, expected, index):
        """An id that row 0 says first at ``index``."""
        token = expected[0][index]
        assert expected[0].index(token) == index
        return token

    @pytest.mark.parametrize("k", [1, 3, 4])
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_rows_stop_at_their_own_eos(self, family, k, make_target, prompts):
        target, inputs = make_target(family), prompts(8)
        texts = row_by_row(target, inputs, max_new_tokens=40, do_sample=False)
        # The id that ends the most rows, at different times.
        eos = max(range(3, 64), key=lambda t: len({r.index(t) for r in texts if t in r}))
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        assert len({len(r) for r in expected}) >= 3
        for drafter in (
            ScriptedDrafter(texts, num_draft_tokens=k),
            ScriptedDrafter(texts, sometimes_wrong, k),
        ):
            output = speculate(target, inputs, drafter, 40, eos_token_id=eos, do_sample=False)
            lengths = [len(r) for r in expected]
            assert new_tokens(output.sequences, inputs, lengths) == expected
            assert [r.num_new_tokens for r in output.speculation.rows] == lengths

    def test_eos_inside_an_accepted_run(self, target, prompts):
        inputs = prompts(1)
        text = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        index = next(i for i in range(2, 5) if text[0].index(text[0][i]) == i)
        eos = text[0][index]
        output = speculate(
            target, inputs, ScriptedDrafter(text), eos_token_id=[EOS, eos], do_sample=False
        )
        assert new_tokens(output.sequences, inputs, [index + 1]) == [text[0][: index + 1]]
        stats = output.speculation
        assert stats.num_accepted_tokens == index  # all but the prefill's token, no bonus token

    @pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5, 6, 7])
    def test_length_limit_inside_a_run(self, target, prompts, num_new):
        inputs = prompts(3)
        text = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        expected = [row[:num_new] for row in text]
        output = speculate(target, inputs, ScriptedDrafter(text), num_new, do_sample=False)
        assert output.sequences.shape[1] == inputs["input_ids"].shape[1] + num_new
        assert new_tokens(output.sequences, inputs, [num_new] * 3) == expected

    def test_a_custom_criterion_stops_where_plain_generation_does(self, target, prompts):
        inputs = prompts(1)
        text = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        token = text[0][6]

        def stop(input_ids, scores, **kwargs):
            seen = (input_ids[:, 9:] == token).any(dim=1)
            return seen

        plain = target.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, stopping_criteria=[stop]
        )
        output = speculate(
            target, inputs, ScriptedDrafter(text), do_sample=False, stopping_criteria=[stop]
        )
        assert torch.equal(plain, output.sequences)
        assert plain.shape[1] < 9 + NEW


class TestProcessors:
    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize(
        "settings",
        [
            {"repetition_penalty": 1.4},
            {"no_repeat_ngram_size": 2},
            {"min_new_tokens": 12, "eos_token_id": 17},
            {"suppress_tokens": [5, 9, 40]},
            {"bad_words_ids": [[7], [12, 13]]},
            {"prefix_allowed_tokens_fn": lambda b, ids: range(3 + b, 50 - len(ids))},
        ],
        ids=lambda s: next(iter(s)),
    )
    def test_processors_that_look_at_the_prefix(
        self, target, make_speculator, prompts, settings, batch
    ):
        inputs = prompts(batch)
        plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, **settings)
        width = inputs["input_ids"].shape[1]
        answers = plain[:, width:].tolist()
        mixed = ScriptedDrafter(answers, sometimes_wrong)
        for drafter in (make_speculator(), ScriptedDrafter(answers), mixed):
            output = speculate(target, inputs, drafter, do_sample=False, **settings)
            assert torch.equal(plain, output.sequences)


def test_streamer_gets_every_token_once_and_in_order(target, prompts):
    inputs = prompts(1)
    text = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
    blocks, ended = [], []

    class Streamer:
        def put(self, value):
            blocks.append(value.flatten().tolist())

        def end(self):
            ended.append(True)

    drafter = ScriptedDrafter(text, sometimes_wrong)
    speculate(target, inputs, drafter, do_sample=False, streamer=Streamer())
    assert blocks[0] == inputs["input_ids"][0].tolist()
    assert sum(blocks[1:], []) == text[0]
    assert max(len(b) for b in blocks[1:]) > 1
    assert ended == [True]


def test_without_return_dict_a_tensor_comes_back(target, make_speculator, prompts):
    inputs = prompts(3)
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    output = target.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=make_speculator()
    )
    assert torch.equal(plain, output)


def test_no_mask_is_no_padding(target, make_speculator):
    # The prompt begins with the padding id; without a mask it is an ordinary token.
    ids = torch.tensor([[PAD, 5, 9, 11]])
    mask = torch.ones_like(ids)
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    output = target.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        assistant_model=make_speculator(),
    )
    assert torch.equal(plain, output)


@pytest.mark.parametrize("prompt_length", [7, 8, 9, 30])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "qwen2"])
def test_prompts_around_and_beyond_the_sliding_window(family, prompt_length, make_target):
    target = make_target(family)
    ids = torch.randint(3, 64, (3, prompt_length))
    ids[1, :4] = PAD
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    expected = row_by_row(target, inputs, max_new_tokens=40, do_sample=False)
    for k in (1, 4):
        drafter = ScriptedDrafter(expected, sometimes_wrong, k)
        output = speculate(target, inputs, drafter, 40, do_sample=False)
        assert new_tokens(output.sequences, inputs, [40] * 3) == expected


@pytest.mark.parametrize("family", ["gpt_bigcode", "llama"])
def test_the_last_position_of_the_model_is_reached(family, make_target):
    # A row at the limit is verified together with one that still drafts: the tokens drafted behind
    # the limit have no position of their own.
    target = make_target(family)
    ids = torch.randint(3, 64, (3, 230))
    mask = torch.ones_like(ids)
    expected = target.generate(ids, attention_mask=mask, max_length=256, do_sample=False)
    answers = expected[:, 230:].tolist()
    drafter = ScriptedDrafter(answers, lambda row, i: row == 1 or sometimes_wrong(row, i))
    output = target.generate(
        ids, attention_mask=mask, max_length=256, do_sample=False, assistant_model=drafter
    )
    assert torch.equal(output, expected)
