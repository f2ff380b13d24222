"""Batches whose rows are streamed and stopped each for itself."""

from typing import Any

import pytest
from row_watchers import Collect, Limits
from tiny_models import EOS, PAD, ScriptedDrafter, row_by_row, sometimes_wrong
from transformers.generation import StoppingCriteriaList

from hf_specdec import SpeculationStats

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_rows_of_a_batch_are_streamed(family, make_target, prompts):
    target, inputs = make_target(family), prompts(3)
    texts = row_by_row(target, inputs, **GREEDY)
    streamer = Collect()
    out = target.generate(
        **inputs,
        **GREEDY,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
        streamer=streamer,
        return_dict_in_generate=True,
    )
    assert streamer.ended
    for row, (text, stats) in enumerate(zip(texts, out.speculation.rows, strict=True)):
        steps = streamer.of_row(row)
        assert streamer.text(row) == text
        assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
        assert sum(step.num_accepted_tokens for step in steps) == stats.num_accepted_tokens
        assert sum(step.num_draft_tokens for step in steps) == stats.num_draft_tokens
        assert stats.num_accepted_tokens > 0
        assert any(step.num_accepted_tokens < step.num_draft_tokens for step in steps)


def test_each_row_ends_at_its_own_limit(target, prompts):
    inputs, limits = prompts(4), [5, 24, 1, 12]
    texts = row_by_row(target, inputs, **GREEDY)
    criterion, streamer = Limits(limits), Collect()
    out = target.generate(
        **inputs,
        **GREEDY,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
        stopping_criteria=StoppingCriteriaList([criterion]),
        streamer=streamer,
    )
    width = inputs["input_ids"].shape[1]
    for row, limit in enumerate(limits):
        assert streamer.text(row) == texts[row][:limit]
        assert out[row, width:].tolist() == texts[row][:limit] + [PAD] * (24 - limit)
        # Exactly what may be emitted, and every token once.
        assert criterion.seen[row][:limit] == texts[row][:limit]
        assert criterion.seen[row] == texts[row][: len(criterion.seen[row])]


def test_a_row_criterion_sees_no_token_behind_the_end(target, prompts):
    inputs = prompts(2)
    eos = row_by_row(target, inputs, **GREEDY)[0][7]
    stop = {**GREEDY, "eos_token_id": [EOS, eos]}
    texts = row_by_row(target, inputs, **stop)
    assert texts[0][-1] == eos and len(texts[0]) < 24
    criterion = Limits([24, 24])
    target.generate(
        **inputs,
        **stop,
        assistant_model=ScriptedDrafter(texts),
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert criterion.seen == texts


def test_the_first_of_two_criteria_cuts_what_the_second_sees(target, prompts):
    text = row_by_row(target, prompts(1), **GREEDY)[0]
    first, second = Limits([7]), Limits([24])
    out = target.generate(
        **prompts(1),
        **GREEDY,
        assistant_model=ScriptedDrafter([text]),
        stopping_criteria=StoppingCriteriaList([first, second]),
    )
    assert second.seen[0] == text[:7] != first.seen[0]
    assert out.shape[1] == prompts(1)["input_ids"].shape[1] + 7


def test_one_row_is_a_batch_too(target, prompts):
    text = row_by_row(target, prompts(1), **GREEDY)[0]
    streamer = Collect()
    target.generate(
        **prompts(1), **GREEDY, assistant_model=ScriptedDrafter([text]), streamer=streamer
    )
    assert streamer.text(0) == text


def test_statistics_can_be_added_up_step_by_step(target, prompts):
    inputs = prompts(3)
    texts = row_by_row(target, inputs, **GREEDY)
    streamer = Collect()
    out = target.generate(
        **inputs,
        **GREEDY,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
        streamer=streamer,
        return_dict_in_generate=True,
    )
    for row, stats in enumerate(out.speculation.rows):
        total = SpeculationStats()
        for step in streamer.of_row(row):
            total += SpeculationStats.of_step(
                len(step.token_ids), step.num_draft_tokens, step.num_accepted_tokens
            )
        stats.num_target_forwards = total.num_target_forwards
        assert total == stats


def test_transformers_own_loops_refuse_both(target, prompts):
    with pytest.raises(RuntimeError, match="Collect is a RowStreamer.*assistant_model"):
        target.generate(**prompts(1), **GREEDY, streamer=Collect())
    criteria = StoppingCriteriaList([Limits([3])])
    with pytest.raises(RuntimeError, match="Limits is a RowStoppingCriteria.*assistant_model"):
        target.generate(**prompts(1), **GREEDY, stopping_criteria=criteria)
