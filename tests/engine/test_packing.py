"""Packed weights: the same numbers, always those of the weight as it is now."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hf_specdec
from hf_specdec.targets.packing import PackedLinear
from hf_specdec.targets.slow_dtypes import has_kernels_for

needs_bfloat16 = pytest.mark.skipif(
    not has_kernels_for(torch.bfloat16), reason="no bfloat16 on this processor"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]


def packed_layer(dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias, dtype=dtype)
    hf_specdec.pack_weights(layer)
    assert type(layer) is PackedLinear
    return layer


def count_packed_calls(monkeypatch):
    calls = []
    packed = torch.ops.mkldnn._linear_pointwise

    def count(*args):
        calls.append(args)
        return packed(*args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", count)
    return calls


def ordinary(layer, states):
    return nn.functional.linear(states, layer.weight, layer.bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 48), (2, 3, 48), (7, 5, 48), (200, 48)], ids=str)
def test_a_packed_layer_computes_what_it_did(dtype, bias, shape, monkeypatch):
    layer = packed_layer(dtype, bias)
    calls = count_packed_calls(monkeypatch)
    states = torch.randn(shape).to(dtype)
    with torch.no_grad():
        result = layer(states)
        assert len(calls) == 1
        torch.testing.assert_close(result, ordinary(layer, states))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generation_is_the_same(dtype, make_target, make_speculator, prompts, monkeypatch):
    target = copy.deepcopy(make_target("llama")).to(dtype)
    drafter = make_speculator().to(dtype)
    inputs = prompts(3)
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    size = hf_specdec.pack_weights(target)
    hf_specdec.pack_weights(drafter)
    calls = count_packed_calls(monkeypatch)
    packed = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    drafted = target.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert size == sum(m.weight.nbytes for m in target.modules() if isinstance(m, nn.Linear))
    assert len(calls) > 100
    if dtype == torch.float32:
        torch.testing.assert_close(packed, plain)
        torch.testing.assert_close(drafted, plain)
    hf_specdec.unpack_weights(target)
    assert not any(type(module) is PackedLinear for module in target.modules())
    torch.testing.assert_close(target.generate(**inputs, max_new_tokens=20, do_sample=False), plain)


def add_to_data(layer):
    """As peft merges an adapter: no version is counted, and the memory stays the same."""
    layer.weight.data += 0.01 * torch.randn(80, 1) @ torch.randn(1, 48)


def test_a_changed_weight_is_used():
    states = torch.randn(3, 48)
    for change in (
        lambda layer: layer.weight.mul_(2),
        add_to_data,
        lambda layer: layer.weight.data.copy_(torch.randn(80, 48)),
        lambda layer: setattr(layer.weight, "data", torch.randn(80, 48)),
        lambda layer: layer.load_state_dict({"weight": torch.randn(80, 48)}),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(80, 48))),
        lambda layer: layer.to(torch.float64),
    ):
        layer = packed_layer()
        with torch.no_grad():
            layer(states)
            change(layer)
            given = states.to(layer.weight.dtype)
            torch.testing.assert_close(layer(given), ordinary(layer, given))
        assert type(layer) is nn.Linear
        assert "_packed" not in layer.__dict__


def test_autocast_decides_the_dtype():
    layer, states = packed_layer(), torch.randn(3, 48)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(states)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, ordinary(layer, states))
    assert type(layer) is PackedLinear


def test_memory_that_runs_out_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    reorder, calls = torch.ops.mkldnn._reorder_linear_weight, []

    def run_out(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("not enough memory")
        return reorder(*args)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", run_out)
    with pytest.raises(RuntimeError, match="not enough memory"):
        hf_specdec.pack_weights(model)
    assert not any(type(layer) is PackedLinear for layer in model)


def test_gradients_flow():
    layer = packed_layer()
    layer(torch.randn(3, 48)).sum().backward()
    assert layer.weight.grad is not None


def test_copies_pickles_and_saved_weights_are_ordinary():
    layer, states = packed_layer(), torch.randn(3, 48)
    assert list(layer.state_dict()) == ["weight"]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight.mul_(2)
            torch.testing.assert_close(other(states), ordinary(other, states))
    assert layer._packed is not None


def test_packing_twice_is_packing_once():
    layer = packed_layer()
    with torch.no_grad():
        layer.weight.mul_(3)
        assert hf_specdec.pack_weights(layer) == layer.weight.nbytes
        states = torch.randn(2, 48)
        torch.testing.assert_close(layer(states), ordinary(layer, states))


def test_what_is_no_plain_linear_stays():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Other(8, 8))
    hf_specdec.pack_weights(model)
    assert [type(layer) for layer in model] == [PackedLinear, Other]


def strided():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.randn(8, 8).T)
    return layer


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Embedding(3, 3), "model=Embedding has no nn.Linear to pack"),
        (nn.Linear(8, 8).half(), "in torch.float16; pack_weights works in bfloat16 and float32"),
        (strided(), "with strides \\(1, 8\\)"),
        (nn.Linear(8, 8, device="meta"), "on meta; pack_weights is for models on CPU"),
    ],
)
def test_refusals(model, message):
    model = nn.Sequential(nn.Linear(4, 4), model) if "Linear" in type(model).__name__ else model
    with pytest.raises(ValueError, match=message):
        hf_specdec.pack_weights(model)
    assert not any(type(layer) is PackedLinear for layer in model.modules())


def test_weights_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="made under torch.inference_mode"):
        hf_specdec.pack_weights(model)


def test_a_processor_without_bfloat16_is_named(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match="no kernels on this processor"):
        hf_specdec.pack_weights(nn.Linear(8, 8, dtype=torch.bfloat16))


def test_a_torch_without_onednn_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="built with oneDNN"):
        hf_specdec.pack_weights(nn.Linear(8, 8))
