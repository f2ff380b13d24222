"""Targets that somebody compiled: their text, and what a drafter reads, are as without."""

import copy
import functools

import pytest
import torch
from tiny_models import ScriptedDrafter, _target, sometimes_wrong

import hf_specdec
from hf_specdec.targets.uncompiled import uncompiled

NEW = 10


class Counts:
    """A backend that runs graphs as they are, and counts the runs.

    Args:
        most: graphs that it takes; more are an error, as tracing them would go on for minutes.
    """

    def __init__(self, most: int = 1000) -> None:
        self.runs = 0
        self._left = most

    def __call__(self, graph, inputs):
        self._left -= 1
        assert self._left >= 0, "compiled anew"

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def compile_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def compile_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


def compile_layers(model, backend):
    for layer in model.model.layers:
        layer.mlp.compile(backend=backend)
    return model


WAYS = [compile_forward, compile_in_place, compile_whole, compile_layers]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_same_text_and_same_drafts(way, prompts, make_speculator):
    inputs, speculator = prompts(3), make_speculator()
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    expected = _target("llama").generate(**inputs, **settings, assistant_model=speculator)
    counts = Counts(most=1000 if way is compile_layers else 0)
    model = way(copy.deepcopy(_target("llama")), counts)
    output = model.generate(**inputs, **settings, assistant_model=speculator)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.speculation == expected.speculation
    # Parts go on as they were compiled; the whole would be compiled anew for most steps.
    assert (counts.runs > 0) == (way is compile_layers)
    hf_specdec.attach(model, {"model": speculator})
    assert model.generate(**inputs, **settings).speculation == expected.speculation
    assert hf_specdec.speculation_totals(model).snapshot().num_drafts > 0
    hf_specdec.detach(model)


def test_sampled(prompts, make_speculator):
    model, inputs = compile_in_place(copy.deepcopy(_target("llama")), Counts()), prompts(2)
    settings = {"max_new_tokens": NEW, "do_sample": True, "row_seeds": [3, 4]}
    settings["assistant_model"] = make_speculator()
    expected = _target("llama").generate(**inputs, **settings, num_assistant_tokens=0)
    assert torch.equal(model.generate(**inputs, **settings), expected)


@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: way.__name__)
def test_the_switch_is_shared_and_put_back(way):
    model = way(copy.deepcopy(_target("llama")), Counts())
    before = dict(model.__dict__)
    with pytest.raises(RuntimeError, match="inside"), uncompiled(model):
        # One call inside another stands for two threads.
        with uncompiled(model):
            assert model.__dict__ != before
        assert model.__dict__ != before
        raise RuntimeError("inside")
    assert model.__dict__ == before


@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: way.__name__)
def test_static_shapes_of_a_compiled_target(way, prompts):
    from compiled_calls import Graphs

    inputs = prompts(1)
    settings = {"max_new_tokens": 5, "do_sample": False, "num_assistant_tokens": 1}
    model, graphs = copy.deepcopy(_target("llama")), Graphs()
    # One layer: graphs take long to trace.
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    plain = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    answers = plain[:, inputs["input_ids"].shape[1] :].tolist()
    speculator = ScriptedDrafter(answers, sometimes_wrong, num_draft_tokens=1)
    model = way(model, Counts())
    ours = model.generate(**inputs, **settings, **graphs.arguments, assistant_model=speculator)
    assert torch.equal(ours, plain)
    # A forward that was replaced can't be read in a graph: that is said, and nothing compiled.
    assert bool(len(graphs)) == (way is compile_in_place)


def test_a_compiled_drafter(target, prompts, make_speculator):
    inputs = prompts(2)
    settings = functools.partial(
        target.generate, **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    expected = settings(assistant_model=make_speculator())
    compiled = torch.compile(make_speculator(), backend=Counts())
    assert settings(assistant_model=compiled).speculation == expected.speculation
