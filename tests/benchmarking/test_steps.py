"""Single steps, timed between the forwards of any loop."""

import time
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE

from hf_specdec.benchmarking import SyntheticDrafter
from hf_specdec.benchmarking.clock import wrapped_methods
from hf_specdec.benchmarking.steps import step_times

NEW, K = 12, 2


class Slow(SyntheticDrafter):
    """Spends time where it drafts; `get_candidates` calls `propose`."""

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.01)
        return super().propose(*args, **kwargs)


@pytest.fixture
def drafter(target, prompts) -> Slow:
    inputs = prompts(1)
    ids = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    answers = ids[:, inputs["input_ids"].shape[1] :].tolist()
    return Slow(answers, NEW + K, VOCAB_SIZE, acceptance=1.0, max_draft_tokens=K)


def test_steps_are_counted_and_their_parts_are_apart(target, prompts, drafter) -> None:
    inputs = prompts(1)

    def call() -> None:
        target.generate(
            **inputs,
            max_new_tokens=NEW,
            do_sample=False,
            assistant_model=drafter,
            num_assistant_tokens=K,
        )

    steps = step_times(target, call, drafter)
    # The prompt's forward gives a token, and a step three.
    assert len(steps) == -(-(NEW - 1) // (K + 1))
    # The last step has no room for drafts.
    for step in steps[:-1]:
        assert step.drafter >= 0.01
        assert step.target > 0
        assert step.loop > 0
        assert step.total == pytest.approx(step.target + step.drafter + step.loop)
    # Without being told of the drafter, its time is the loop's.
    steps = step_times(target, call)
    assert all(step.drafter == 0 and step.loop >= 0.01 for step in steps[:-1])


def test_plain_generate_has_a_step_for_each_token_but_the_first(target, prompts) -> None:
    steps = step_times(
        target, lambda: target.generate(**prompts(2), max_new_tokens=NEW, do_sample=False)
    )
    assert len(steps) == NEW - 1
    assert not target._forward_hooks
    assert not target._forward_pre_hooks


def test_calls_inside_of_the_drafter_count_once(target, drafter) -> None:
    """As in transformers' loop, whose `get_candidates` observes and proposes."""
    ids = torch.tensor([[3, 4, 5]])

    def call() -> None:
        drafter.start(target)
        output = target(ids, output_hidden_states=True)
        drafter.get_candidates(
            torch.cat([ids, ids[:, :1]], dim=1), model_outputs=output, n_last_matches=0
        )
        target(ids)

    (step,) = step_times(target, call, drafter)
    assert 0.01 <= step.drafter <= step.total - step.target


def test_wrapped_methods_are_put_back_also_after_an_error() -> None:
    class Thing:
        def method(self) -> int:
            return 1

    thing, other = Thing(), Thing()
    with (
        pytest.raises(ZeroDivisionError),
        wrapped_methods(thing, ["method"], lambda method: lambda: 10 * method()),
    ):
        assert (thing.method(), other.method()) == (10, 1)
        1 / 0  # noqa: B018
    assert thing.method() == 1
    assert "method" not in thing.__dict__
