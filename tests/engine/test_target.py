"""What drafters are fed: the state after the final norm, at the right positions, per family."""

import threading

import pytest
import torch
from tiny_models import FAMILIES

from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.target import RaggedTarget


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_the_output_head_reads(family, make_target, prompts):
    target, inputs = make_target(family), prompts(3)
    padding = (inputs["attention_mask"] == 0).sum(1)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    runner = RaggedTarget(target, Prompt.plain(inputs["input_ids"], padding), 4, 100)
    more = torch.randint(3, 64, (3, 4))
    with runner.capture():
        first = runner.prefill(
            {"attention_mask": inputs["attention_mask"], "position_ids": positions}
        )
        runner.cache.advance(torch.ones(3, dtype=torch.long), [1, 1, 1])
        second = runner.verify(more)
    for row in range(3):
        ids = torch.cat([inputs["input_ids"][row, padding[row] :], more[row]])[None]
        states = target(ids, output_hidden_states=True).hidden_states
        expected = states[-1][0, -5:]
        torch.testing.assert_close(first.hidden_states[row, 0], expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(second.hidden_states[row], expected[1:], atol=1e-4, rtol=1e-4)
        # Two mistakes that no output would show: the state before the norm, and its neighbour.
        assert not torch.allclose(second.hidden_states[row], states[-2][0, -4:], atol=1e-2)
        assert not torch.allclose(second.hidden_states[row], expected[:-1], atol=1e-2)


@torch.no_grad()
def test_a_head_that_is_not_called_is_an_error(target, prompts, monkeypatch):
    inputs = prompts(1)
    runner = RaggedTarget(
        target, Prompt.plain(inputs["input_ids"], torch.zeros(1, dtype=torch.long)), 4, 50
    )
    monkeypatch.setattr(target, "get_output_embeddings", lambda: torch.nn.Linear(2, 2))
    with runner.capture(), pytest.raises(RuntimeError, match="get_output_embeddings"):
        runner.prefill({"attention_mask": inputs["attention_mask"]})


@torch.no_grad()
def test_states_of_another_threads_forward_are_not_taken(target, prompts):
    inputs = prompts(1)
    runner = RaggedTarget(
        target, Prompt.plain(inputs["input_ids"], torch.zeros(1, dtype=torch.long)), 4, 50
    )

    def run_elsewhere(*_):
        # Once, right after the runner's own forward has been picked up.
        handle.remove()
        other = threading.Thread(target=target, args=(torch.randint(3, 64, (5, 7)),))
        other.start()
        other.join()

    with runner.capture():
        handle = target.get_output_embeddings().register_forward_hook(run_elsewhere)
        output = runner.prefill({"attention_mask": inputs["attention_mask"]})
    expected = target(inputs["input_ids"], output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(output.hidden_states, expected[:, -1:], atol=1e-4, rtol=1e-4)
