"""Acceptance statistics: counted by hand against what a call reports."""

import pytest
from tiny_models import ScriptedDrafter, row_by_row

from hf_specdec.metrics import SpeculationStats, StatsRecorder


def test_counts_of_a_scripted_call(target, prompts):
    # K = 3. The token at index 4 of the answer is drafted wrong, everything else right:
    # prefill -> index 0; draft 1-3 accepted, bonus 4; draft 5-7 accepted, bonus 8; ...
    answers = row_by_row(target, prompts(1), max_new_tokens=9, do_sample=False)

    def wrong(row, index):
        return index == 6

    output = target.generate(
        **prompts(1),
        assistant_model=ScriptedDrafter(answers, wrong, 3),
        max_new_tokens=9,
        do_sample=False,
        return_dict_in_generate=True,
    )
    stats = output.speculation
    # Steps: 1-3 + bonus 4; 5 accepted, 6 corrected; one draft (7) before the limit + bonus 8.
    assert stats.num_target_forwards == 4
    assert stats.num_drafts == 3
    assert stats.num_draft_tokens == 3 + 3 + 1
    assert stats.accepted_per_position == [3, 1, 1]
    assert stats.num_accepted_tokens == 5
    assert stats.num_new_tokens == 9
    assert stats.acceptance_rate == pytest.approx(5 / 7)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert stats.per_position == pytest.approx([1, 1 / 3, 1 / 3])
    assert stats.rows[0].num_accepted_tokens == 5
    # Every token is the prefill's, a bonus token or an accepted draft.
    assert stats.num_new_tokens == 1 + stats.num_drafts + stats.num_accepted_tokens


def test_rows_add_up_to_the_call(target, make_speculator, prompts):
    output = target.generate(
        **prompts(8),
        assistant_model=make_speculator(),
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
    )
    stats = output.speculation
    total = sum(stats.rows, SpeculationStats())
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_new_tokens"):
        assert getattr(total, name) == getattr(stats, name)
    assert stats.num_new_tokens == 8 * 20


def test_recorder_with_rows_that_leave_and_k_that_shrinks():
    recorder = StatsRecorder(3)
    recorder.record_step([0, 1, 2], [0, 0, 0], 0)
    recorder.record_step([0, 1, 2], [2, 0, 1], 2)
    recorder.record_step([0, 2], [1, 0], 1)
    recorder.record_step([2], [0], 0)
    stats = recorder.finish([5, 1, 4])
    assert stats.num_target_forwards == 4
    assert stats.num_drafts == 5
    assert stats.num_draft_tokens == 8
    assert stats.accepted_per_position == [3, 1]
    assert [r.num_accepted_tokens for r in stats.rows] == [3, 0, 1]
    assert [r.num_draft_tokens for r in stats.rows] == [3, 2, 3]


def test_a_call_without_drafts_has_rates_of_zero():
    stats = StatsRecorder(1).finish([3])
    assert stats.acceptance_rate == 0.0
    assert stats.mean_acceptance_length == 1.0
    assert stats.per_position == []


def test_calls_add_up():
    a = SpeculationStats(2, 6, 3, [2, 1], 3, 5)
    b = SpeculationStats(1, 1, 1, [1], 2, 2)
    total = a + b
    assert total.accepted_per_position == [3, 1]
    assert (total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens) == (3, 7, 4)
    assert "4 of 7 draft tokens in 3 drafts" in str(total)
