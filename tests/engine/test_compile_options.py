"""Which calls are compiled, how, and what is said about those that can't be."""

from types import SimpleNamespace

import pytest
import torch
from compiled_calls import Graphs, small_target
from tiny_models import ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong
from transformers import AutoModelForCausalLM, BambaConfig, CompileConfig, GenerationConfig

from hf_specdec.auto_length import AutoDraftLength
from hf_specdec.call import compile_options
from hf_specdec.call.compile_options import compile_choice, widths
from hf_specdec.call.decoding_settings import DecodingSettings
from hf_specdec.options.lookup_options import PromptLookup
from hf_specdec.options.schedule import DraftLength
from hf_specdec.outputs import OutputRequest
from hf_specdec.static_shapes import CompileChoice

NOTHING = OutputRequest()


@pytest.fixture
def said(monkeypatch):
    """What is warned about; transformers' logger says everything only once."""
    messages: list[str] = []
    monkeypatch.setattr(compile_options.logger, "warning_once", messages.append)
    return messages


def choice_of(target, outputs=NOTHING, feed="post_norm", **fields):
    return compile_choice(GenerationConfig(**fields), target, outputs, feed)


def on_cuda(monkeypatch, target):
    monkeypatch.setattr(type(target), "device", property(lambda self: torch.device("cuda")))


class TestChoice:
    def test_on_a_cpu_only_if_it_is_asked_for(self, target, said):
        assert choice_of(target, cache_implementation="static") is None
        config = CompileConfig()
        both = {"cache_implementation": "static", "compile_config": config}
        assert choice_of(target, **both) == CompileChoice()
        assert choice_of(target, **both, disable_compile=True) is None
        assert not said

    def test_on_cuda_unless_it_is_refused(self, target, monkeypatch, said):
        on_cuda(monkeypatch, target)
        assert choice_of(target) is None
        static = {"cache_implementation": "static"}
        assert choice_of(target, **static) == CompileChoice(graphs=True)
        assert choice_of(target, **static, disable_compile=True) is None
        assert not said

    @pytest.mark.parametrize(
        ("mode", "expected", "graphs"),
        [
            ("reduce-overhead", None, True),
            ("max-autotune", "max-autotune-no-cudagraphs", True),
            ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs", False),
            ("default", "default", False),
        ],
    )
    def test_modes(self, mode, expected, graphs, target, monkeypatch):
        arguments = {
            "cache_implementation": "static",
            "compile_config": CompileConfig(mode=mode, fullgraph=True),
        }
        assert choice_of(target, **arguments) == CompileChoice(mode=expected, fullgraph=True)
        on_cuda(monkeypatch, target)
        expected_choice = CompileChoice(mode=expected, fullgraph=True, graphs=graphs)
        assert choice_of(target, **arguments) == expected_choice

    def test_options_come_instead_of_a_mode(self, target):
        config = CompileConfig(options={"max_autotune": True})
        choice = choice_of(target, cache_implementation="static", compile_config=config)
        assert choice == CompileChoice(options=(("max_autotune", True),))

    def test_dynamic_shapes_are_refused(self, target, prompts):
        with pytest.raises(ValueError, match=r"compile_config has dynamic=True.*static shapes"):
            target.generate(
                **prompts(1),
                assistant_model=ScriptedDrafter([[0]]),
                cache_implementation="static",
                compile_config=CompileConfig(dynamic=True),
            )

    def test_no_static_cache_no_compilation(self, target, said):
        assert choice_of(target, compile_config=CompileConfig()) is None
        assert len(said) == 1
        assert "cache_implementation isn't 'static'" in said[0]


class TestWhatCannotBe:
    """The same tokens from ordinary buffers, and a word about it."""

    def refused(self, target, said, match, **kwargs):
        fields = {"cache_implementation": "static", "compile_config": CompileConfig()}
        assert choice_of(target, **fields, **kwargs) is None
        assert len(said) == 1
        assert match in said[0]
        assert "The tokens are the same" in said[0]

    def test_outputs_of_all_layers(self, target, said):
        outputs = OutputRequest(hidden_states=True)
        self.refused(target, said, "returns hidden states or attentions", outputs=outputs)

    def test_recurrent_layers(self, said):
        config = BambaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=1,
        )
        target = AutoModelForCausalLM.from_config(config)
        self.refused(target, said, "BambaForCausalLM has recurrent layers")

    @pytest.mark.parametrize("feed", ["post_norm", "pre_norm"])
    def test_a_forward_that_was_replaced(self, feed, said):
        target = small_target(num_hidden_layers=1)
        target.forward = target.forward
        self.refused(target, said, "forward of LlamaForCausalLM has been replaced", feed=feed)

    def test_several_devices(self, said):
        target = small_target(num_hidden_layers=1)
        target.hf_device_map = {"model": 0, "lm_head": "cpu"}
        self.refused(target, said, "spread over devices ['0', 'cpu']")

    def test_a_quantizer_that_says_no(self, said):
        target = small_target(num_hidden_layers=1)
        target.hf_quantizer = SimpleNamespace(is_compileable=False)
        self.refused(target, said, "quantized in a way that can't be compiled")

    def test_the_tokens_are_the_same(self, target, prompts, said):
        inputs, graphs = prompts(2), Graphs()
        expected = row_by_row(target, inputs, max_new_tokens=9, do_sample=False)
        output = target.generate(
            **inputs,
            assistant_model=ScriptedDrafter(expected, sometimes_wrong),
            max_new_tokens=9,
            do_sample=False,
            output_hidden_states=True,
            return_dict_in_generate=True,
            **graphs.arguments,
        )
        assert new_tokens(output.sequences, inputs, [9, 9]) == expected
        assert not graphs.compiled
        assert len(said) == 1


def test_trees_are_not_compiled(said, prompts, make_speculator):
    target, inputs, graphs = small_target(), prompts(2), Graphs()
    expected = row_by_row(target, inputs, max_new_tokens=9, do_sample=False)
    tokens = target.generate(
        **inputs,
        assistant_model=make_speculator(emb_dim=target.config.hidden_size),
        num_tree_nodes=4,
        max_new_tokens=9,
        do_sample=False,
        **graphs.arguments,
    )
    assert new_tokens(tokens, inputs, [9, 9]) == expected
    assert not graphs.compiled
    assert "candidate trees are drafted" in said[0]


class TestWidths:
    @staticmethod
    def of(length, lookup=None):
        seeds = torch.zeros(1, dtype=torch.long)
        return widths(
            DecodingSettings(length, False, seeds, False, None, 0, max_length=9, lookup=lookup)
        )

    def test_one_for_a_constant_k(self):
        assert self.of(DraftLength(3, 5)) == [4]

    def test_plain_steps_too_where_they_are_a_choice(self):
        length = AutoDraftLength(3, 3, None, "auto", choices=range(4))
        assert self.of(length) == [1, 4]

    def test_each_k_of_a_schedule_by_batch_size(self):
        assert self.of(DraftLength(3, 5, [[1, 2, 9], [3, 4, 2], [5, 64, 0]])) == [1, 3, 4]

    def test_the_most_of_a_heuristic(self):
        assert self.of(DraftLength(2, 5, schedule="heuristic_transient")) == [6]

    def test_wider_ones_where_drafts_are_looked_up(self):
        assert self.of(DraftLength(3, 5), PromptLookup(8)) == [4, 9]
        assert self.of(DraftLength(0, 8), PromptLookup(8)) == [1, 9]

    def test_they_are_what_runs(self, prompts):
        target, inputs, graphs = small_target(num_hidden_layers=1), prompts(2), Graphs()
        expected = row_by_row(target, inputs, max_new_tokens=20, do_sample=False)
        output = target.generate(
            **inputs,
            assistant_model=ScriptedDrafter(expected, lambda row, index: row == 1, 3),
            num_speculative_tokens_per_batch_size=[[1, 1, 3], [2, 2, 1]],
            max_new_tokens=20,
            do_sample=False,
            return_dict_in_generate=True,
            **graphs.arguments,
        )
        assert new_tokens(output.sequences, inputs, [20, 20]) == expected
        shapes = set()
        for graph in graphs.compiled:
            inputs_of = [n for n in graph.graph.nodes if n.op == "placeholder"]
            (tokens,) = [n for n in inputs_of if n.name.lower() == "l_tokens_"]
            shapes.add(tuple(tokens.meta["example_value"].shape))
        assert shapes == {(2, 2), (1, 4)}
