"""Losses against closed forms, their gradients, and sampled against full softmax."""

import pytest
import torch

from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.training.objectives import (
    OutputLayer,
    SampledSoftmax,
    soft_cross_entropy,
    target_weights,
)

VOCAB, WIDTH, BATCH, TOP = 40, 8, 5, 3


@pytest.fixture
def case():
    """An output layer, three distinct targets per position, and their weights."""
    features = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    table = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    columns = torch.stack([torch.randperm(VOCAB)[:TOP] for _ in range(BATCH)])
    weights = torch.rand(BATCH, TOP).double()
    weights = weights / weights.sum(-1, keepdim=True)
    return features.float(), table.float(), columns, weights.float()


def test_closed_forms():
    # Equal logits: log V, whatever the targets.
    loss = soft_cross_entropy(torch.zeros(1, 8), torch.tensor([[3, 5]]), torch.tensor([[0.5, 0.5]]))
    assert loss.item() == pytest.approx(2.0794415)
    # Logits log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8.
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    loss = soft_cross_entropy(logits, torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]]))
    assert loss.item() == pytest.approx(0.75 * 0.4700036 + 0.25 * 2.0794415)
    # Without any covered target there is no loss.
    assert soft_cross_entropy(logits, torch.tensor([[0]]), torch.zeros(1, 1)).item() == 0


def test_loss_and_gradient_are_those_of_dense_cross_entropy(case):
    features, table, columns, weights = case
    logits = (features @ table.T).requires_grad_()
    weights[2] = 0
    dense = torch.zeros(BATCH, VOCAB).scatter_(1, columns, weights)
    expected = torch.nn.functional.cross_entropy(logits, dense, reduction="none")
    found = soft_cross_entropy(logits, columns, weights)
    torch.testing.assert_close(found, expected)
    scale = torch.arange(1.0, BATCH + 1)
    (expected_grad,) = torch.autograd.grad((expected * scale).sum(), logits)
    (found_grad,) = torch.autograd.grad((found * scale).sum(), logits)
    torch.testing.assert_close(found_grad, expected_grad)


def test_low_precision_logits_are_computed_in_float32(case):
    features, table, columns, weights = case
    logits = (30 * features @ table.T).bfloat16()
    found = soft_cross_entropy(logits, columns, weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, soft_cross_entropy(logits.float(), columns, weights))


def test_target_weights_sum_to_one_over_what_is_covered():
    logprobs = torch.tensor([[0.5, 0.25, 0.125]]).log()
    covered = torch.tensor([[True, False, True]])
    torch.testing.assert_close(target_weights(logprobs, covered), torch.tensor([[0.8, 0.0, 0.2]]))
    assert target_weights(logprobs, ~covered & False).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("frequent", [0, 7])
def test_sampling_every_id_is_the_full_softmax(case, frequent):
    features, table, columns, weights = case
    weights[1, 2] = 0  # a target that does not count is an ordinary id
    sampled = SampledSoftmax(VOCAB, VOCAB - frequent, torch.arange(frequent))
    drawn = sampled.draw(torch.Generator())
    assert sorted(drawn.tolist()) == list(range(VOCAB))
    table.requires_grad_()
    found = sampled(OutputLayer(features, table), drawn, columns, weights)
    expected = soft_cross_entropy(features @ table.T, columns, weights)
    torch.testing.assert_close(found, expected)
    (found_grad,) = torch.autograd.grad(found.sum(), table)
    (expected_grad,) = torch.autograd.grad(expected.sum(), table)
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_the_estimated_partition_function_is_unbiased(case):
    """Without the correction by log pi, or with a target counted twice, the mean is far off."""
    features, table, columns, weights = case
    sampled = SampledSoftmax(VOCAB, 10, torch.tensor([3, 30, 17]))
    layer = OutputLayer(features, table)
    logits = features @ table.T
    at_targets = (weights * logits.gather(1, columns)).sum(-1)
    estimates = []
    for seed in range(3000):
        drawn = sampled.draw(torch.Generator().manual_seed(seed))
        loss = sampled(layer, drawn, columns, weights)
        estimates.append((loss + at_targets).exp())
    stacked = torch.stack(estimates)
    error = stacked.mean(0) - logits.exp().sum(-1)
    standard_error = stacked.std(0) / len(stacked) ** 0.5
    assert (error.abs() < 4 * standard_error).all()
    assert (standard_error < 0.05 * logits.exp().sum(-1)).all()


@pytest.mark.parametrize("num_sampled", [0, 38])
def test_number_of_sampled_ids(num_sampled):
    with pytest.raises(ValueError, match=f"num_sampled={num_sampled} must be 1 to 37"):
        SampledSoftmax(VOCAB, num_sampled, torch.arange(3))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduced", [0, 9])
def test_output_layer_is_the_heads_own(shared, reduced):
    config = MLPSpeculatorConfig(
        vocab_size=VOCAB,
        emb_dim=WIDTH,
        inner_dim=6,
        share_target_weights=shared,
        draft_vocab_size=reduced,
    )
    model = MLPSpeculatorPreTrainedModel(config)
    state = torch.randn(4, 6)
    if shared:
        with pytest.raises(RuntimeError, match="bind_target"):
            OutputLayer.of(model, 1, state)
        model.bind_target(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH))
    layer = OutputLayer.of(model, 1, state)
    torch.testing.assert_close(layer.features @ layer.table.T, model.head_logits(1, state))


def test_a_position_without_targets_has_no_gradient(case):
    features, table, columns, weights = case
    weights[1] = 0
    features.requires_grad_()
    sampled = SampledSoftmax(VOCAB, 10, torch.arange(7))
    drawn = sampled.draw(torch.Generator())
    loss = sampled(OutputLayer(features, table), drawn, columns, weights)
    assert loss[1].item() == 0
    (grad,) = torch.autograd.grad(loss.sum(), features)
    assert torch.isfinite(grad).all()
    assert grad[1].abs().max() == 0 < grad[0].abs().max()
