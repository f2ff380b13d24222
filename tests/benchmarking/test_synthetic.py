"""The drafter of known quality: accepted as often as asked, and never in the way of the text."""

import itertools
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, new_tokens, row_by_row
from transformers.generation import GenerationMixin

from hf_specdec import integration
from hf_specdec.benchmarking import synthetic
from hf_specdec.benchmarking.synthetic import ROUNDS, SyntheticDrafter, settle

TOKENS = 160
K = 4


def drafter_for(answers: list[list[int]], acceptance: float, **fields: Any) -> SyntheticDrafter:
    arguments: dict[str, Any] = {"max_new_tokens": TOKENS, "max_draft_tokens": K, **fields}
    return SyntheticDrafter(answers, vocab_size=VOCAB_SIZE, acceptance=acceptance, **arguments)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_draft_tokens_are_accepted_with_the_given_probability(
    target, prompts, acceptance: float
) -> None:
    inputs = prompts(8)
    common = {"max_new_tokens": TOKENS, "do_sample": False}
    answers = new_tokens(target.generate(**inputs, **common), inputs, [TOKENS] * 8)
    output = target.generate(
        **inputs,
        **common,
        assistant_model=drafter_for(answers, acceptance),
        return_dict_in_generate=True,
    )
    assert new_tokens(output.sequences, inputs, [TOKENS] * 8) == answers
    stats = output.speculation
    # A draft ends at its first wrong token, or with its K-th: what came behind wasn't looked at.
    ended_early = stats.num_drafts - stats.accepted_per_position[K - 1]
    looked_at = stats.num_accepted_tokens + ended_early
    measured = stats.num_accepted_tokens / looked_at
    # The last draft of each row may be cut short by the length limit.
    cut = 8 / looked_at
    deviation = (acceptance * (1 - acceptance) / looked_at) ** 0.5
    assert abs(measured - acceptance) <= 3 * deviation + cut
    if acceptance == 0.7:
        # All positions, and the formula for the mean acceptance length.
        for position, rate in enumerate(stats.per_position, start=1):
            assert rate == pytest.approx(acceptance**position, abs=0.08)
        expected = (1 - acceptance ** (K + 1)) / (1 - acceptance)
        assert stats.mean_acceptance_length == pytest.approx(expected, abs=0.15)


def test_rows_that_end_early_leave_and_the_others_go_on(target, prompts) -> None:
    """With end tokens that stop the rows at different places."""
    inputs = prompts(8)
    common = {"max_new_tokens": 40, "do_sample": False}
    plain = row_by_row(target, inputs, **common)
    ends = [plain[0][7], plain[1][20], plain[2][3]]
    answers = row_by_row(target, inputs, **common, eos_token_id=ends)
    lengths = [len(answer) for answer in answers]
    assert len(set(lengths)) > 2
    sequences = target.generate(
        **inputs, **common, eos_token_id=ends, assistant_model=drafter_for(answers, 0.6)
    )
    assert new_tokens(sequences, inputs, lengths) == answers


def test_coins_are_the_seeds(target, prompts) -> None:
    inputs = prompts(2)
    common = {"max_new_tokens": 40, "do_sample": False}
    answers = row_by_row(target, inputs, **common)

    def accepted(seed: int) -> list[int]:
        drafter = drafter_for(answers, 0.5, seed=seed)
        output = target.generate(
            **inputs, **common, assistant_model=drafter, return_dict_in_generate=True
        )
        return output.speculation.accepted_per_position

    assert accepted(1) == accepted(1) != accepted(2)


def test_wrong_answers_cost_acceptance_and_nothing_else(target, prompts) -> None:
    inputs = prompts(2)
    common = {"max_new_tokens": 20, "do_sample": False}
    right = row_by_row(target, inputs, **common)
    drafter = drafter_for([[3] * 20, [4] * 20], 1.0)
    sequences = target.generate(**inputs, **common, assistant_model=drafter)
    assert new_tokens(sequences, inputs, [20, 20]) == right


def test_runs_in_transformers_own_loop(target, prompts, monkeypatch) -> None:
    original = integration._originals["_assisted_decoding"]

    def theirs(self, *args, speculation_options=None, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", theirs)
    inputs = prompts(1)
    common = {"max_new_tokens": 30, "do_sample": False}
    answers = row_by_row(target, inputs, **common)
    forwards: list[Any] = []
    with target.register_forward_hook(lambda *_: forwards.append(1)):
        sequences = target.generate(**inputs, **common, assistant_model=drafter_for(answers, 0.8))
    assert new_tokens(sequences, inputs, [30]) == answers
    # With as many forwards as tokens nothing would have been accepted.
    assert len(forwards) < 20


def test_a_draft_costs_what_was_asked(monkeypatch, target) -> None:
    """On a clock that goes on by a millisecond with each look at it."""
    looks = itertools.count()
    monkeypatch.setattr(synthetic.time, "perf_counter", lambda: next(looks) / 1000)
    for cost, expected in ((0.0, 0), (0.005, 22)):
        drafter = drafter_for([[5] * 8], 1.0, max_new_tokens=8, seconds_per_token=cost)
        drafter.start(target)
        before = next(looks)
        drafter.propose(torch.tensor([5]), 4)
        assert next(looks) - before - 1 == pytest.approx(expected, abs=1)


def test_answers_settle_on_what_is_said() -> None:
    drafter = drafter_for([[1, 2, 3]], 1.0)
    said = [[[1, 9, 9]], [[1, 9, 8]], [[1, 9, 8]]]
    assert settle(drafter, lambda: said.pop(0))
    assert drafter.answers == [[1, 9, 8]]
    assert not said


def test_answers_that_never_settle_end_somewhere() -> None:
    drafter = drafter_for([[0]], 1.0)
    rounds = iter(range(1, 100))
    assert not settle(drafter, lambda: [[next(rounds)]])
    assert drafter.answers == [[ROUNDS]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"acceptance": 1.5}, "acceptance=1.5 must be a probability from 0 to 1"),
        ({"acceptance": 0.5, "seconds_per_token": -1}, "seconds_per_token=-1 must not be negative"),
        ({"acceptance": 0.5, "max_new_tokens": 2}, "up to 3 tokens: there must be 1 of at most 2"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_for([[1, 2, 3]], **fields)


def test_answers_for_other_rows_are_refused() -> None:
    drafter = drafter_for([[1, 2, 3]], 1.0)
    with pytest.raises(ValueError, match="2 answers of up to 1 tokens: there must be 1"):
        drafter.answers = [[1], [2]]
