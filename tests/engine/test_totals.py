"""Statistics over many calls: every call of an attached target counts once, from any thread."""

import copy
import pickle
import threading

import pytest

import hf_specdec
from hf_specdec import SpeculationStats, SpeculationTotals
from hf_specdec.metrics import log_line

# Counted by hand: 4 drafts of 3 tokens, the first accepted 3 times, the second twice.
STATS = SpeculationStats(4, 12, 5, [3, 2, 0], num_target_forwards=5, num_new_tokens=10)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_log_line_is_vllms() -> None:
    assert log_line(STATS, 2.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.25, Accepted throughput: 2.50 tokens/s, "
        "Drafted throughput: 6.00 tokens/s, Accepted: 5 tokens, Drafted: 12 tokens, "
        "Per-position acceptance rate: 0.750, 0.500, 0.000, Avg Draft acceptance rate: 41.7%"
    )
    assert "Mean acceptance length: 1.00, Accepted throughput: 0.00" in log_line(
        SpeculationStats(), 0.0
    )


def test_a_line_is_about_the_time_since_the_last_one() -> None:
    clock = Clock()
    totals = SpeculationTotals(clock)
    totals.add(STATS)
    clock.now += 2.0
    assert totals.log_line() == log_line(STATS, 2.0)
    totals.add(SpeculationStats(1, 4, 4, [1, 1, 1, 1]))
    totals.add(STATS)
    clock.now += 5.0
    assert totals.log_line() == log_line(STATS + SpeculationStats(1, 4, 4, [1, 1, 1, 1]), 5.0)
    clock.now += 1.0
    assert "Accepted: 0 tokens" in totals.log_line()
    assert totals.snapshot().num_accepted_tokens == 14


def test_reset_starts_from_zero() -> None:
    clock = Clock()
    totals = SpeculationTotals(clock)
    totals.add(STATS)
    assert totals.reset() == STATS
    assert totals.snapshot() == SpeculationStats()
    totals.add(STATS)
    clock.now += 1.0
    assert totals.log_line() == log_line(STATS, 1.0)


def test_a_snapshot_does_not_change() -> None:
    totals = SpeculationTotals()
    totals.add(STATS)
    before = totals.snapshot()
    before.accepted_per_position[0] = 99
    totals.add(STATS)
    assert totals.snapshot() == STATS + STATS
    assert before.num_drafts == 4


def test_no_thread_is_lost() -> None:
    totals = SpeculationTotals()

    def work() -> None:
        for _ in range(2000):
            totals.add(STATS)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals.snapshot().num_drafts == 8 * 2000 * 4


def test_as_dict_is_json_of_counts_and_rates() -> None:
    assert STATS.as_dict() == {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 5,
        "accepted_per_position": [3, 2, 0],
        "num_target_forwards": 5,
        "num_new_tokens": 10,
        "num_tree_nodes": 0,
        "acceptance_rate": pytest.approx(5 / 12),
        "mean_acceptance_length": 2.25,
    }


def test_differences_count_what_came_between() -> None:
    later = STATS + SpeculationStats(1, 4, 4, [1, 1, 1, 1], 2, 5)
    assert later - STATS == SpeculationStats(1, 4, 4, [1, 1, 1, 1], 2, 5)


def test_every_call_of_an_attached_target_is_counted(target, make_speculator, prompts) -> None:
    drafter = make_speculator()
    hf_specdec.attach(target, {"model": drafter})
    try:
        totals = hf_specdec.speculation_totals(target)
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        expected = SpeculationStats()
        for rows in (1, 3):
            expected = expected + target.generate(**prompts(rows), **options).speculation
        assert totals.snapshot() == expected
        assert expected.num_new_tokens == 4 * 12
        # Without return_dict, too.
        target.generate(**prompts(1), max_new_tokens=12, do_sample=False)
        assert totals.snapshot().num_new_tokens == 5 * 12
        # Not the attached drafter's work, and not a call that failed.
        target.generate(**prompts(1), assistant_model=make_speculator(seed=4), max_new_tokens=4)
        with pytest.raises(ValueError, match="num_speculative_tokens"):
            target.generate(
                **prompts(1), speculative_config={"num_speculative_tokens": 99}, max_new_tokens=4
            )
        assert totals.snapshot().num_new_tokens == 5 * 12
    finally:
        hf_specdec.detach(target)
    with pytest.raises(ValueError, match="nothing is attached to this LlamaForCausalLM"):
        hf_specdec.speculation_totals(target)


def test_a_copy_counts_for_itself(target, make_speculator, prompts) -> None:
    # A model of its own: hooks that transformers left on the shared one can't be pickled.
    original = type(target)(target.config).eval()
    original.generation_config = copy.deepcopy(target.generation_config)
    hf_specdec.attach(original, {"model": make_speculator()})
    original.generate(**prompts(1), max_new_tokens=6, do_sample=False)
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        copied.generate(**prompts(1), max_new_tokens=6, do_sample=False)
        totals = hf_specdec.speculation_totals(copied)
        assert totals.snapshot().num_new_tokens == 12
        assert totals.log_line().startswith("SpecDecoding metrics: ")
    assert hf_specdec.speculation_totals(original).snapshot().num_new_tokens == 6
