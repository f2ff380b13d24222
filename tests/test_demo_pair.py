"""The shipped drafter on its real target: what it reads is right, and it changes nothing.

A wrong feed never shows in the output, only in the acceptance, so acceptance is compared: the state
at the last accepted position against the states that a mistake would feed.
"""

from dataclasses import replace

import pytest
import torch

from hf_specdec.cli.demo_pair import DRAFTER_DIRECTORY, load_demo_pair
from hf_specdec.drafters import MLPDrafter, VerifiedStep

PROMPTS = [
    "What are the benefits of drinking water?",
    "Write a Python function that adds two numbers.",
]


@pytest.fixture(scope="module")
def pair():
    return load_demo_pair(torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def inputs(pair):
    texts = [
        pair.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in PROMPTS
    ]
    return pair.tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )


@pytest.fixture(scope="module")
def plain(pair, inputs):
    return pair.target.generate(**inputs, max_new_tokens=48, do_sample=False)


def speculate(pair, inputs, drafter):
    return pair.target.generate(
        **inputs,
        max_new_tokens=48,
        do_sample=False,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )


@pytest.fixture(scope="module")
def right(pair, inputs):
    return speculate(pair, inputs, pair.drafter)


def test_the_text_is_the_targets_and_the_drafts_are_worth_it(plain, right):
    assert torch.equal(right.sequences, plain)
    assert right.speculation.mean_acceptance_length > 1.4


class ReadsTheFirstState(MLPDrafter):
    """Off by the accepted tokens: the state of the step's first position."""

    def observe(self, step: VerifiedStep) -> None:
        super().observe(replace(step, num_accepted=torch.zeros_like(step.num_accepted)))


class ReadsTheLastState(MLPDrafter):
    """The state of the step's last position, rejected or not."""

    def observe(self, step: VerifiedStep) -> None:
        last = torch.full_like(step.num_accepted, step.hidden_states.shape[1] - 1)
        super().observe(replace(step, num_accepted=last))


class ReadsTheTokenBefore(MLPDrafter):
    """The last token that was run instead of the one chosen after it."""

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        self._run = step.input_ids.gather(1, step.num_accepted[:, None])[:, 0]

    def propose(self, token_ids, num_draft_tokens, pick=None):
        return super().propose(self._run, num_draft_tokens, pick)

    def keep_rows(self, order):
        super().keep_rows(order)
        self._run = self._run[list(order)]


@pytest.mark.parametrize("wrong_feed", [ReadsTheFirstState, ReadsTheLastState, ReadsTheTokenBefore])
def test_a_wrong_feed_costs_acceptance(pair, inputs, plain, right, wrong_feed):
    output = speculate(pair, inputs, wrong_feed(pair.drafter))
    assert torch.equal(output.sequences, plain), "a bad drafter must not change the text"
    wanted = right.speculation.mean_acceptance_length
    assert output.speculation.mean_acceptance_length - 1 < 0.85 * (wanted - 1)


def test_the_shipped_files_are_small():
    assert sum(f.stat().st_size for f in DRAFTER_DIRECTORY.iterdir()) < 16_000_000
