"""What torch has compiled goes with the function, the model, and ``release_compiled``."""

import gc
import traceback
import types

import pytest
import torch
from compiled_calls import Graphs, small_target
from tiny_pairs import random_speculator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import CompileConfig

import hf_specdec
from hf_specdec import static_shapes
from hf_specdec.static_shapes import CompileChoice, StaticShapes, without_base


def living(kind):
    """How many objects of this very type there are."""
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


class Counting:
    """A backend that runs graphs as they are, and keeps none."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward

    def __deepcopy__(self, memo):
        return self


def make_pair():
    target = small_target()
    return target, random_speculator(target)


def make_adder(number):
    def function(x):
        return (x + number,)

    return function


def speculate(target, speculator):
    backend = Counting()
    said = target.generate(
        torch.tensor([[5, 6, 7, 8]] * 2),
        assistant_model=speculator,
        max_new_tokens=8,
        do_sample=False,
        cache_implementation="static",
        compile_config=CompileConfig(backend=backend),
    )
    # One for the target and one for the drafter.
    assert backend.count == 2
    return said


@pytest.mark.parametrize("end", ["released", "dropped"])
def test_nothing_stays_of_what_was_traced(end):
    pair, counts = make_pair(), []
    for _ in range(3):
        speculate(*pair)
        if end == "released":
            for model in pair:
                hf_specdec.release_compiled(model)
        else:
            pair = make_pair()
        # The last is the places of guards in the source.
        kinds = torch.fx.GraphModule, FakeTensorMode, FakeTensor, traceback.StackSummary
        counts.append([living(kind) for kind in kinds])
    # torch keeps what it has traced last.
    assert counts[2] == counts[1]
    assert counts[2][0] == 0


def test_calls_after_the_release_are_right():
    target, speculator = make_pair()
    inputs = torch.tensor([[5, 6, 7, 8]] * 2)
    expected = target.generate(inputs, max_new_tokens=8, do_sample=False)
    for _ in range(2):
        assert torch.equal(speculate(target, speculator), expected)
        hf_specdec.release_compiled(target)
        hf_specdec.release_compiled(speculator)


def test_other_functions_are_left_alone():
    graphs = Graphs()
    shapes, others = StaticShapes(), StaticShapes()
    choice = CompileChoice(backend=graphs)
    kept = others.function("a", choice, lambda: make_adder(1))
    shapes.function("a", choice, lambda: make_adder(2))(torch.zeros(2))
    kept(torch.zeros(2))
    shapes.forget()
    gc.collect()
    assert kept(torch.ones(2))[0].tolist() == [2, 2]
    assert len(graphs) == 2


@pytest.mark.parametrize("missing", ["reset_code", "_debug_get_cache_entry_list"])
def test_a_torch_that_lacks_what_is_private(missing, monkeypatch):
    adder = make_adder(1)
    function = torch.compile(adder, backend="eager", dynamic=False)
    function(torch.zeros(1))
    monkeypatch.delattr(torch._dynamo.eval_frame, missing)
    # Called here, as nobody hears of errors in a finalizer.
    static_shapes._drop_compiled(adder.__code__)
    assert function(torch.zeros(1))[0].tolist() == [1]


def test_a_finished_function_is_asked_about_its_own_code(monkeypatch):
    dropped: list[types.CodeType] = []
    monkeypatch.setattr(static_shapes, "_drop_compiled", dropped.append)
    shapes = StaticShapes()
    shapes.function("a", CompileChoice(backend="eager"), lambda: lambda x: (x,))
    assert dropped == []
    shapes.forget()
    gc.collect()
    assert [code.co_name for code in dropped] == ["<lambda>"]


def test_tensors_without_a_base():
    base = torch.arange(12.0).reshape(4, 3)
    views = (base[1:3], [(base.T, None)], base[:, ::2])
    first, [(second, nothing)], third = own = without_base(views)
    assert isinstance(own, tuple)
    assert nothing is None
    for tensor, view in ((first, views[0]), (second, base.T), (third, views[2])):
        assert not tensor._is_view()
        assert tensor.stride() == view.stride()
        assert torch.equal(tensor, view)
    first[0, 0] = 50
    assert base[1, 0] == 50
    base[3, 2] = 60
    assert second[2, 3] == 60
