"""Acceptance: the longest right prefix plus one token, by matching and by rejection."""

import pytest
import torch
from scipy import stats

from hf_specdec.verification import choose_tokens, count_accepted, verify_match, verify_rejection


def test_the_longest_matching_prefix_counts():
    chosen = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4]])
    draft = torch.tensor([[1, 2, 3]]).expand(4, -1)
    assert count_accepted(draft, chosen).tolist() == [3, 1, 0, 2]


def test_greedy_verdict_emits_the_targets_choices():
    logits = torch.full((2, 3, 8), -5.0)
    for b, row in enumerate([[1, 2, 3], [4, 5, 6]]):
        for q, token in enumerate(row):
            logits[b, q, token] = 1.0
    verdict = verify_match(torch.tensor([[1, 2], [4, 0]]), logits)
    assert verdict.num_accepted.tolist() == [2, 1]
    assert verdict.tokens[0].tolist() == [1, 2, 3]
    assert verdict.tokens[1, :2].tolist() == [4, 5]


def test_no_draft_gives_one_token():
    verdict = verify_match(
        torch.empty(2, 0, dtype=torch.long), torch.eye(5)[None, [3]].repeat(2, 1, 1)
    )
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.tokens.tolist() == [[3], [3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_id_in_every_dtype(dtype):
    logits = torch.zeros(1, 2, 5000, dtype=dtype)
    logits[0, 0, [4321, 77, 900]] = 2.0
    assert choose_tokens(logits).tolist() == [[77, 0]]


def one_step(draft_probs, target_probs, rows=40_000):
    """Draft one token and verify it by rejection, many times; returns the emitted first tokens."""
    vocabulary = len(target_probs)
    draft = torch.multinomial(draft_probs, rows, replacement=True)[:, None]
    logits = target_probs.log().expand(rows, 2, vocabulary)
    seeds = torch.arange(rows)
    positions = torch.tensor([[10, 11]]).expand(rows, 2)
    verdict = verify_rejection(
        draft, draft_probs.expand(rows, 1, vocabulary), logits, seeds, positions
    )
    return verdict.tokens[:, 0], verdict.num_accepted


TARGET = torch.tensor([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize(
    "draft_probs",
    [
        [0.25, 0.25, 0.25, 0.25],
        [0.05, 0.15, 0.3, 0.5],
        [0.0, 0.0, 1.0, 0.0],
        [0.5, 0.3, 0.15, 0.05],
    ],
    ids=["uniform", "opposite", "one-hot", "equal"],
)
def test_rejection_emits_the_targets_distribution(draft_probs):
    draft_probs = torch.tensor(draft_probs)
    tokens, num_accepted = one_step(draft_probs, TARGET)
    counts = tokens.bincount(minlength=4)
    assert stats.chisquare(counts, TARGET * len(tokens), sum_check=False).pvalue > 1e-3
    # The known acceptance rate: the overlap of the two distributions.
    overlap = float(torch.minimum(draft_probs, TARGET).sum())
    assert float(num_accepted.float().mean()) == pytest.approx(overlap, abs=0.01)


def test_a_wrong_draft_distribution_would_be_noticed():
    # The error this guards against: argmax drafts verified with their softmax.
    draft = torch.zeros(40_000, 1, dtype=torch.long)
    claimed = torch.tensor([0.6, 0.2, 0.1, 0.1]).expand(40_000, 1, 4)
    positions = torch.tensor([[10, 11]]).expand(40_000, 2)
    logits = TARGET.log().expand(40_000, 2, 4)
    verdict = verify_rejection(draft, claimed, logits, torch.arange(40_000), positions)
    counts = verdict.tokens[:, 0].bincount(minlength=4)
    assert stats.chisquare(counts, TARGET * 40_000, sum_check=False).pvalue < 1e-6


def test_the_bonus_token_follows_the_last_logits():
    rows = 20_000
    draft = torch.zeros(rows, 1, dtype=torch.long)
    sure = torch.tensor([1.0, 0, 0, 0])
    logits = torch.stack([sure.log(), TARGET.log()]).expand(rows, 2, 4)
    positions = torch.tensor([[3, 4]]).expand(rows, 2)
    verdict = verify_rejection(
        draft, sure.expand(rows, 1, 4), logits, torch.arange(rows), positions
    )
    assert (verdict.num_accepted == 1).all()
    counts = verdict.tokens[:, 1].bincount(minlength=4)
    assert stats.chisquare(counts, TARGET * rows, sum_check=False).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_temperature_given_to_verification_divides_first(temperature):
    """Bit for bit what the processor does beforehand."""
    logits = 5 * torch.randn(3, 4, 50, dtype=torch.bfloat16)
    draft_probs = logits[:, :3].float().softmax(dim=-1)
    draft_ids = draft_probs.argmax(dim=-1)
    noise = torch.arange(3), torch.arange(4).expand(3, 4)
    divided = logits.float() / temperature
    for given, beforehand in (
        (
            verify_match(draft_ids, logits, *noise, temperature),
            verify_match(draft_ids, divided, *noise),
        ),
        (
            verify_rejection(draft_ids, draft_probs, logits, *noise, temperature),
            verify_rejection(draft_ids, draft_probs, divided, *noise),
        ),
    ):
        assert torch.equal(given.tokens, beforehand.tokens)
        assert torch.equal(given.num_accepted, beforehand.num_accepted)
    assert not torch.equal(
        verify_match(draft_ids, logits, *noise, temperature).tokens,
        verify_match(draft_ids, logits, *noise, 9.0).tokens,
    )
