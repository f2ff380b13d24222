"""num_assistant_tokens="auto": simulated steps with known costs and acceptance, and real calls."""

import random

import pytest
import torch
from tiny_models import ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong
from transformers import GenerationConfig

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.auto_length import AutoDraftLength, Measurements
from hf_specdec.call import call_options

CHOICES = [0, 1, 2, 3]


class Machine:
    """Runs steps in a time of its own.

    Args:
        rate: probability that a draft is accepted, given the one before it was.
        step: seconds of a step by (rows, K).
        noise: largest relative error of a step's time; one step in twenty takes ten times as long.
    """

    def __init__(self, rate, step, noise=0.05, measurements=None, **fields):
        self.now, self.rate, self.step, self.noise = 0.0, rate, step, noise
        self.random = random.Random(1)
        self.length = AutoDraftLength(
            3,
            3,
            schedule="auto",
            measurements=measurements or Measurements(),
            choices=CHOICES,
            clock=lambda: self.now,
            **fields,
        )

    def run(self, num_steps, rows=1):
        """Returns (tokens a second, K of every step); a hiccup isn't counted as time."""
        tokens = seconds = 0.0
        used = []
        for _ in range(num_steps):
            k = self.length.next(rows, most=99)
            accepted = [self._accept(k) for _ in range(rows)]
            cost = self.step(rows, k)
            seconds += cost
            hiccup = 10 if self.random.random() < 0.05 else 1
            self.now += cost * hiccup * (1 + self.noise * self.random.uniform(-1, 1))
            self.length.update(k, accepted)
            tokens += 1 + sum(accepted) / rows
            used.append(k)
        return tokens / seconds, used

    def _accept(self, k):
        accepted = 0
        while accepted < k and self.random.random() < self.rate:
            accepted += 1
        return accepted


def small_target(rows, k):
    """A memory-bound step, with drafts that cost a twentieth of it."""
    return 1 + 0.07 * k


def large_batch(rows, k):
    """A step whose cost grows with its tokens where there are many rows."""
    return 1 + 0.05 * k + max(0, rows * (k + 1) - 8) * 0.15


def speed_of(rate, k, cost):
    return sum(rate**i for i in range(k + 1)) / cost


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.05])
def test_a_useless_drafter_costs_less_than_three_percent(rate):
    speed, used = Machine(rate, small_target).run(400)
    assert speed > 0.97
    assert used.count(0) > 300


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_a_good_drafter_runs_at_nearly_its_best_k(rate):
    speed, used = Machine(rate, small_target).run(400)
    best = max(speed_of(rate, k, small_target(1, k)) for k in CHOICES)
    assert speed > 0.94 * best


def test_k_falls_where_a_batch_makes_verification_dear():
    machine = Machine(0.6, large_batch)
    alone = machine.run(100)[1]
    crowded = machine.run(200, rows=16)[1]
    assert max(set(alone), key=alone.count) == 3
    assert max(set(crowded), key=crowded.count) == 0
    again = machine.run(20)[1]
    assert max(set(again), key=again.count) == 3


def test_a_change_of_the_text_is_noticed():
    machine = Machine(0.0, small_target)
    assert machine.run(200)[1][-20:].count(0) >= 18
    machine.rate = 0.9
    used = machine.run(600)[1]
    assert used[-50:].count(0) < 5
    machine.rate = 0.0
    used = machine.run(200)[1]
    assert used[-50:].count(0) > 40


def test_the_next_call_begins_with_what_was_learnt():
    measurements = Measurements()
    Machine(0.0, small_target, measurements=measurements).run(100)
    assert Machine(0.0, small_target, measurements=measurements).run(10)[1] == [0] * 10


def test_a_k_that_was_measured_in_a_bad_moment_is_tried_again():
    cost = {0: 1, 1: 1.4, 2: 1.1, 3: 1.6}
    machine = Machine(0.6, lambda rows, k: cost[k])
    for _ in range(2):
        machine.length.measurements.record(1, 2, [2], 50.0)
    used = machine.run(1500)[1]
    assert used[-50:].count(2) > 40


def test_short_calls_try_other_k_too():
    cost = {0: 1, 1: 1.05, 2: 2.5, 3: 3}
    measurements = Measurements()
    for _ in range(60):
        machine = Machine(0.9, lambda rows, k: cost[k], measurements=measurements)
        used = machine.run(10)[1]
    assert used.count(1) >= 9


def test_a_drafter_that_stops_early_is_measured_by_what_was_asked_of_it():
    machine = Machine(0.0, small_target)
    for _ in range(10):
        machine.length.next(1, most=99)
        machine.now += 1
        # One draft where three were allowed, and it was wrong.
        machine.length.update(1, [0])
    measured = machine.length.measurements
    assert measured.is_measured(1, 3)
    assert measured.is_measured(1, 0)
    assert not measured.is_measured(1, 1)


def test_what_is_left_to_generate_limits_k():
    length = Machine(0.9, small_target).length
    assert length.next(1, most=1) == 1
    length.update(1, [1])
    assert length.measurements.last_step(1, 1) == 1
    assert length.next(1, most=0) == 0


def test_measurements_are_used_by_one_thread_at_a_time():
    class Watched(Measurements):
        def record(self, *args):
            assert self.lock.locked()
            super().record(*args)

        def rate(self, *args):
            assert self.lock.locked()
            return super().rate(*args)

    Machine(0.5, small_target, measurements=Watched()).run(40)


def test_a_clock_that_stands_still_does_no_harm():
    length, used = Machine(0.9, small_target).length, []
    for _ in range(20):
        used.append(length.next(1, most=99))
        length.update(used[-1], [used[-1]])
    assert used.count(3) > 15


def test_limits_by_batch_size_hold():
    machine = Machine(0.95, small_target, per_batch_size=[[1, 1, 3], [2, 4, 1], [5, 9, 0]])
    assert max(machine.run(60)[1]) == 3
    assert max(machine.run(60, rows=3)[1]) == 1
    assert set(machine.run(60, rows=6)[1]) == {0}


def test_generation_is_plain_generations(target, prompts):
    inputs = prompts(3)
    answers = row_by_row(target, inputs, max_new_tokens=60, do_sample=False)
    drafter = ScriptedDrafter(answers, sometimes_wrong)
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        num_assistant_tokens="auto",
        max_new_tokens=60,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert new_tokens(output.sequences, inputs, [60] * 3) == answers
    # Each K was measured, so both plain and drafting steps were made.
    assert 0 < output.speculation.num_drafts < 3 * output.speculation.num_target_forwards
    measured = call_options._measured[drafter]
    assert measured.is_measured(2, 0)
    assert measured.tokens(1) > 1.5


@pytest.mark.parametrize("seeded", [False, True])
def test_speculator_in_a_batch_attached(target, make_speculator, prompts, seeded):
    inputs = prompts(5)
    options = {"max_new_tokens": 40, "do_sample": seeded}
    options |= {"row_seeds": [1, 2, 3, 4, 5]} if seeded else {}
    speculator = make_speculator()
    wanted = target.generate(
        **inputs, **options, assistant_model=speculator, num_assistant_tokens=0
    )
    config = {"model": speculator, "num_speculative_tokens": "auto"}
    hf_specdec.attach(target, config)
    try:
        torch.testing.assert_close(target.generate(**inputs, **options), wanted)
    finally:
        hf_specdec.detach(target)


def test_layers_are_used_equally_often():
    class Layers(ScriptedDrafter):
        max_draft_tokens = 64
        default_draft_tokens = 3

    options = dict.fromkeys(
        ("num_assistant_tokens_schedule", "num_speculative_tokens_per_batch_size")
    )
    options |= {"num_assistant_tokens": "auto", "speculative_config": SpeculativeConfig()}
    drafter = Layers([[1]])
    length = call_options.draft_length(options, GenerationConfig(), drafter, drafter)
    assert isinstance(length, AutoDraftLength)
    assert list(length.choices) == [0, 1, 2, 3]
    assert length.limit == 3


def test_auto_and_a_schedule_contradict_each_other(target, make_speculator, prompts):
    with pytest.raises(ValueError, match="both change K while generating; give one of them"):
        target.generate(
            **prompts(1),
            assistant_model=make_speculator(),
            num_assistant_tokens="auto",
            num_assistant_tokens_schedule="heuristic",
        )


def test_another_word_is_refused(target, make_speculator, prompts):
    with pytest.raises(ValueError, match="num_assistant_tokens='automatic' must be an integer"):
        target.generate(
            **prompts(1), assistant_model=make_speculator(), num_assistant_tokens="automatic"
        )
    with pytest.raises(ValueError, match="num_speculative_tokens='automatic' must be an integer"):
        SpeculativeConfig(num_speculative_tokens="automatic")  # type: ignore[arg-type]


class TestSlowestRow:
    """A batch is over when its slowest row is."""

    @staticmethod
    def chosen(rates, cost):
        """K of the last hundred of many steps over rows with rates of their own."""
        machine = Machine(0.0, cost)
        used = []
        for _ in range(400):
            k = machine.length.next(len(rates), most=99)
            accepted = []
            for rate in rates:
                machine.rate = rate
                accepted.append(machine._accept(k))
            machine.now += cost(len(rates), k)
            machine.length.update(k, accepted)
            used.append(k)
        return used[-100:]

    @staticmethod
    def cost(rows, k):
        return 1 + 0.25 * k

    def test_drafts_that_one_row_never_accepts_are_not_worth_it(self):
        # On average a row accepts 0.45 of a draft, for a quarter of a step.
        used = self.chosen([0.6, 0.6, 0.6, 0.0], self.cost)
        assert used.count(0) > 80

    def test_rows_that_are_alike_gain_alike(self):
        used = self.chosen([0.45] * 4, self.cost)
        assert used.count(0) < 20

    def test_a_single_row_has_no_slowest(self):
        measurements = Measurements()
        measurements.record_rows(1, [5], 10)
        for _ in range(2):
            measurements.record(1, 0, [0], 1.0)
            measurements.record(1, 1, [1], 1.0)
        assert measurements.rate(1, 1) == pytest.approx(2.0)
