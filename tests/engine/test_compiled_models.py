"""What is compiled of a target and its drafter: states, packed weights, chains, real code."""

import copy
import gc
import weakref

import pytest
import torch
from compiled_calls import Graphs, small_target
from tiny_models import ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong
from transformers import CompileConfig

from hf_specdec import pack_weights, release_compiled, unpack_weights
from hf_specdec.drafters.compiled_chain import CompiledChain
from hf_specdec.static_shapes import CompileChoice, kept_for
from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.recorded_states import RecordedModel
from hf_specdec.targets.static_target import StaticTarget
from hf_specdec.targets.target import RaggedTarget


def run(target, inputs, drafter, num_new=12, **arguments):
    return target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=num_new,
        do_sample=False,
        return_dict_in_generate=True,
        **arguments,
    )


@torch.no_grad()
@pytest.mark.parametrize("feed", ["post_norm", "pre_norm"])
def test_a_drafter_is_shown_the_same_states(feed, prompts):
    target, inputs = small_target(), prompts(3)
    padding = (inputs["attention_mask"] == 0).sum(1)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    prompt = Prompt.plain(inputs["input_ids"], padding)
    choice = CompileChoice(backend="eager", fullgraph=True)
    runners = [
        RaggedTarget(target, prompt, 4, 100),
        StaticTarget(target, prompt, 4, 100, choice=choice, widths=[4]),
    ]
    results = []
    for runner in runners:
        generator = torch.Generator().manual_seed(1)
        outputs = []
        with runner.capture(feed):
            runner.prefill({"attention_mask": inputs["attention_mask"], "position_ids": positions})
            runner.advance(torch.ones(3, dtype=torch.long), [1, 1, 1])
            for width, kept in ((4, [1, 2, 4]), (2, [2, 1, 1]), (4, [1, 1, 1])):
                tokens = torch.randint(3, 64, (3, width), generator=generator)
                outputs.append(runner.verify(tokens))
                runner.advance(torch.tensor(kept), kept)
        results.append(outputs)
    for ours, theirs in zip(*results, strict=True):
        assert ours.logits.shape == theirs.logits.shape
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.hidden_states, theirs.hidden_states, atol=1e-4, rtol=1e-4)


class TestRecordedModel:
    @torch.no_grad()
    def test_the_model_stays_as_it_is(self):
        model = small_target(num_hidden_layers=1)
        before = {name: id(module) for name, module in model.named_modules()}
        attributes = [dict(module.__dict__) for module in (model, model.model)]
        recorded = RecordedModel(model, "pre_norm")
        ids = torch.tensor([[3, 4, 5]])
        logits = recorded.model(input_ids=ids, use_cache=False).logits
        assert torch.equal(logits, model(input_ids=ids, use_cache=False).logits)
        assert {name: id(module) for name, module in model.named_modules()} == before
        assert [dict(m.__dict__) for m in (model, model.model)] == attributes
        states = model.model.norm(recorded.recorder.states)
        torch.testing.assert_close(model.lm_head(states), logits)
        assert len(list(recorded.model.parameters())) == len(list(model.parameters()))

    def test_it_follows_the_model(self):
        model = small_target(num_hidden_layers=1)
        recorded = RecordedModel(model, "post_norm")
        model.train()
        model.model = copy.deepcopy(model.model)
        assert recorded.follow()
        assert recorded.model.training
        assert recorded.model.model is model.model
        model.set_output_embeddings(torch.nn.Linear(32, 64, bias=False))
        assert not recorded.follow()

    def test_a_module_that_is_not_there(self, monkeypatch):
        model = small_target(num_hidden_layers=1)
        monkeypatch.setattr(model, "get_output_embeddings", lambda: torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match="can't be recorded behind its post_norm state"):
            RecordedModel(model, "post_norm")

    def test_another_head_is_compiled_anew(self, prompts):
        target, inputs, graphs = small_target(num_hidden_layers=1), prompts(1), Graphs()
        texts = []
        for _ in range(2):
            expected = row_by_row(target, inputs, max_new_tokens=12, do_sample=False)
            drafter = ScriptedDrafter(expected, sometimes_wrong, 2)
            output = run(target, inputs, drafter, **graphs.arguments)
            assert new_tokens(output.sequences, inputs, [12]) == expected
            texts.append(expected)
            head = torch.nn.Linear(32, 64, bias=False)
            head.weight.data = -target.lm_head.weight.detach().roll(5, 0)
            target.set_output_embeddings(head)
        assert texts[0] != texts[1]
        assert len(graphs) == 2


class TestPackedWeights:
    def test_compiled_code_uses_them(self, prompts, monkeypatch):
        target, inputs, graphs = small_target(), prompts(1), Graphs()
        expected = row_by_row(target, inputs, max_new_tokens=12, do_sample=False)

        def check(weights_packed):
            drafter = ScriptedDrafter(expected, sometimes_wrong, 2)
            calls = []
            original = torch.ops.mkldnn._linear_pointwise

            def counted(*arguments):
                calls.append(1)
                return original(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
                output = run(target, inputs, drafter, **graphs.arguments)
            assert new_tokens(output.sequences, inputs, [12]) == expected
            assert bool(calls) == weights_packed

        pack_weights(target)
        check(True)
        operators = [str(node.target) for node in graphs.compiled[0].graph.nodes]
        # Seven of each layer, and the head.
        assert sum("packed_linear" in name for name in operators) == 15
        unpack_weights(target)
        check(False)
        pack_weights(target)
        check(True)
        assert len(graphs) == 2, "packed again, the code for packed weights serves"

    @torch.no_grad()
    def test_a_weight_that_changes_is_noticed(self):
        layer = torch.nn.Linear(8, 6)
        model = torch.nn.Sequential(layer)
        pack_weights(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        x = torch.randn(2, 3, 8)
        torch.testing.assert_close(compiled(x), torch.nn.functional.linear(x, *layer.parameters()))
        layer.weight.mul_(3.0)
        torch.testing.assert_close(compiled(x), torch.nn.functional.linear(x, *layer.parameters()))

    def test_with_gradients_it_is_an_ordinary_layer(self):
        model = torch.nn.Sequential(torch.nn.Linear(8, 6))
        pack_weights(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(torch.randn(2, 8)).sum().backward()
        assert model[0].weight.grad is not None

    def test_a_copy_has_a_number_of_its_own(self):
        layer = torch.nn.Sequential(torch.nn.Linear(8, 6))
        pack_weights(layer)
        other = copy.deepcopy(layer)
        pack_weights(other)
        assert other[0]._number != layer[0]._number


class TestChain:
    @torch.no_grad()
    @pytest.mark.parametrize(
        "fields", [{}, {"share_target_weights": True, "scale_input": True}, {"draft_vocab_size": 9}]
    )
    def test_the_drafts_are_the_same(self, fields, target, make_speculator):
        model = make_speculator(**fields)
        bound = model
        if fields.get("share_target_weights"):
            weights = target.get_input_embeddings().weight, target.get_output_embeddings().weight
            bound = model.bound_to(*weights)
        graphs = Graphs()
        choice = CompileChoice(backend=graphs, fullgraph=True)
        for rows in (3, 4, 3):
            states, ids = torch.randn(rows, 32), torch.randint(3, 64, (rows,))
            chain = CompiledChain(model, bound, 4, choice)
            assert torch.equal(chain(states, ids), bound.propose(states, ids, 4))
        assert len(graphs) == 1

    @torch.no_grad()
    def test_two_targets(self, make_speculator):
        model, choice = make_speculator(share_target_weights=True), CompileChoice(backend="eager")
        tables = [(torch.randn(64, 32), torch.randn(64, 32)) for _ in range(2)]
        states, ids = torch.randn(4, 32), torch.randint(3, 64, (4,))
        drafts = []
        for pair in (*tables, tables[0]):
            bound = model.bound_to(*pair)
            drafts.append(CompiledChain(model, bound, 4, choice)(states, ids))
            assert torch.equal(drafts[-1], bound.propose(states, ids, 4))
        assert not torch.equal(drafts[0], drafts[1])

    def test_generate_uses_it_for_greedy_drafts(self, make_speculator, prompts):
        target, model = small_target(num_hidden_layers=1), make_speculator(n_predict=2)
        inputs, graphs = prompts(1), Graphs()
        expected = row_by_row(target, inputs, max_new_tokens=12, do_sample=False)
        ordinary = run(target, inputs, model)
        compiled = run(target, inputs, model, **graphs.arguments)
        assert new_tokens(compiled.sequences, inputs, [12]) == expected
        assert compiled.speculation == ordinary.speculation
        # The target's forward, and the chain.
        assert len(graphs) == 2
        run(target, inputs, model)
        assert len(graphs) == 2

    def test_a_speculator_goes_when_nobody_has_it(self, make_speculator):
        model = make_speculator()
        chain = CompiledChain(model, model, 4, CompileChoice(backend="eager"))
        with torch.no_grad():
            chain(torch.randn(1, 32), torch.tensor([5]))
        gone = weakref.ref(model)
        del chain, model
        gc.collect()
        assert gone() is None


def test_real_code(make_speculator, prompts):
    """The one test with torch's own compiler; it takes the better part of a minute."""
    target, speculator = small_target(num_hidden_layers=1), make_speculator(n_predict=2)
    inputs = prompts(1)
    expected = row_by_row(target, inputs, max_new_tokens=12, do_sample=False)
    arguments = {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=True)}
    output = run(target, inputs, ScriptedDrafter(expected, sometimes_wrong, 2), **arguments)
    assert new_tokens(output.sequences, inputs, [12]) == expected
    output = run(target, inputs, speculator, **arguments)
    assert new_tokens(output.sequences, inputs, [12]) == expected
    # Inductor drops the factor of an add behind a matmul: the drafts would be others.
    chain = CompiledChain(speculator, speculator, 2, CompileChoice(fullgraph=True))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _ in range(8):
            states = torch.randn(1, 32, generator=generator)
            ids = torch.randint(3, 64, (1,), generator=generator)
            assert torch.equal(chain(states, ids), speculator.propose(states, ids, 2))
    assert kept_for(target)._free
    release_compiled(target)
