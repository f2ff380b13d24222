"""The MLP speculator's stage behind its projection, kernel and twin against float64."""

import math
from typing import Any

import pytest
import torch

from hf_specdec.kernels import mlp_stage
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig
from hf_specdec.modeling.mlp_speculator.network import MLPSpeculatorNetwork

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = [mlp_stage.finish_stage, mlp_stage.finish_stage_twin]
SIZES = [1, 7, 24, 100, 576, 3071, 4096, 8192]


def operands(inner, dtype, device, rows=3, entries=5, scale=1.0) -> tuple[Any, ...]:
    shapes = ((rows, inner), (entries, inner), (inner,), (inner,))
    tensors = [(torch.randn(shape) * scale).to(device, dtype) for shape in shapes]
    ids = torch.tensor([entries - 1, 0, entries - 1][:rows], device=device)
    projected, table, weight, bias = tensors
    return projected, table, ids, 3.7, weight, bias


def in_float64(projected, table, ids, alpha, weight, bias):
    x = projected.double() + alpha * (table if ids is None else table[ids]).double()
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    x = weight.double() * x + bias.double()
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def assert_near(found, expected, places):
    """Within some units in the last place of the largest number around."""
    tolerance = places * torch.finfo(found.dtype).eps * max(1.0, float(expected.abs().max()))
    assert found.isfinite().all()
    assert float((found.double() - expected.double()).abs().max()) <= tolerance


@pytest.mark.parametrize("stage", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", SIZES)
def test_it_is_the_formula(stage, dtype, inner, device, poisoned) -> None:
    arguments = operands(inner, dtype, device)
    found = stage(*arguments)
    assert found.dtype == dtype and found.shape == arguments[0].shape
    # Each of seven roundings is half a place of a number of about the result's size.
    assert_near(found, in_float64(*arguments), 4 if dtype != torch.float32 else 16)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_is_the_network(dtype, share, device) -> None:
    config = MLPSpeculatorConfig(vocab_size=11, emb_dim=6, inner_dim=20, n_predict=2)
    network = MLPSpeculatorNetwork(config).to(device, dtype).requires_grad_(False)
    for parameter in network.parameters():
        parameter.normal_()
    state, ids = torch.randn(3, 20, device=device).to(dtype), torch.tensor([10, 0, 4]).to(device)
    norm: Any = network.ln[1]
    table: Any = network.emb[1].weight
    projected = network.proj[1](state)
    # With shared tables the embeddings of the rows are given, not looked up.
    look_up: tuple[Any, Any] = (table[ids], None) if share else (table, ids)
    twin = mlp_stage.finish_stage_twin(
        projected, *look_up, network.emb_scale, norm.weight, norm.bias
    )
    assert torch.equal(twin, network.stage(1, state, ids))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [512, 3071])
def test_the_kernel_rounds_where_torch_rounds(dtype, inner, device) -> None:
    """Nearly every element is the twin's, bit for bit; a sum in another order moves a few."""
    arguments = operands(inner, dtype, device)
    found, expected = mlp_stage.finish_stage(*arguments), mlp_stage.finish_stage_twin(*arguments)
    assert_near(found, expected, 4)
    if dtype != torch.float32:
        assert float((found != expected).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_given_embeddings_are_added_row_by_row(dtype, device, poisoned) -> None:
    projected, table, ids, *rest = operands(24, dtype, device)
    given = mlp_stage.finish_stage(projected, table[ids], None, *rest)
    assert torch.equal(given, mlp_stage.finish_stage(projected, table, ids, *rest))


def test_rows_of_views_are_read_where_they_are(device) -> None:
    projected, table, ids, *rest = operands(24, torch.float32, device)
    wide = torch.full((3, 40), float("nan"), device=device)
    wide[:, 8:32] = projected
    wide_table = torch.full((5, 30), float("nan"), device=device)
    wide_table[:, :24] = table
    found = mlp_stage.finish_stage(wide[:, 8:32], wide_table[:, :24], ids, *rest)
    assert found.is_contiguous()
    assert torch.equal(found, mlp_stage.finish_stage(projected, table, ids, *rest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturated_rows_are_what_torch_makes_of_them(dtype, device) -> None:
    """Squares that overflow give a scale of zero, and the shift alone remains."""
    projected, table, ids, alpha, weight, bias = operands(64, dtype, device)
    projected[1] = torch.finfo(dtype).max / 8
    arguments = (projected, table * 0, ids, alpha, weight, bias)
    found, expected = mlp_stage.finish_stage(*arguments), mlp_stage.finish_stage_twin(*arguments)
    assert torch.equal(expected[1], torch.nn.functional.gelu(bias))
    assert_near(found, expected, 4)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_broken_row_stays_alone(value, device) -> None:
    arguments = operands(40, torch.bfloat16, device)
    whole = mlp_stage.finish_stage(*arguments)
    arguments[0][1, 7] = value
    found, expected = mlp_stage.finish_stage(*arguments), mlp_stage.finish_stage_twin(*arguments)
    assert torch.equal(found[[0, 2]], whole[[0, 2]])
    assert torch.equal(found[1].isnan(), expected[1].isnan())


def test_a_zero_row_is_not_divided_by_zero(device) -> None:
    arguments = operands(40, torch.float32, device, scale=0.0)
    assert torch.equal(mlp_stage.finish_stage(*arguments), torch.zeros(3, 40, device=device))


def test_small_rows_feel_the_epsilon(device) -> None:
    arguments = list(operands(40, torch.float32, device, scale=1e-4))
    arguments[4], arguments[5] = torch.ones(40, device=device), torch.zeros(40, device=device)
    assert_near(mlp_stage.finish_stage(*arguments), in_float64(*arguments), 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_agrees_and_can_disagree(dtype, device, monkeypatch) -> None:
    like = torch.zeros(1, dtype=dtype, device=device)
    assert mlp_stage.agrees(like)
    kernel = mlp_stage.finish_stage
    monkeypatch.setattr(
        mlp_stage, "finish_stage", lambda p, t, i, _, w, b: kernel(p, t, i, 3.0, w, b)
    )
    assert not mlp_stage.agrees(like)
