"""The seams into transformers: open for our assistants, invisible for everything else."""

import copy
import importlib
from typing import Any

import pytest
import torch
import transformers
from tiny_models import ScriptedDrafter, row_by_row
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

import hf_specdec
from hf_specdec import integration
from hf_specdec.registry import drafter_for

SEAMS = sorted(integration._WRAPPERS)


def test_published_ids_of_the_architecture_resolve(tmp_path, make_speculator):
    make_speculator().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "mlp_speculator"
    for auto in (AutoModel, AutoModelForCausalLM):
        model = auto.from_pretrained(tmp_path)
        assert type(model) is hf_specdec.MLPSpeculatorPreTrainedModel
    architectures: Any = model.config.architectures
    (name,) = architectures
    assert getattr(transformers, name) is type(model)
    # Where pipelines look, also after a network of transformers' own was imported.
    assert getattr(importlib.import_module("transformers"), name) is type(model)


def test_disable_puts_every_original_back_and_enable_works_again(target, make_speculator, prompts):
    wrapped = {name: getattr(integration._owner(name), name) for name in SEAMS}
    hf_specdec.disable()
    for name in SEAMS:
        original = getattr(integration._owner(name), name)
        assert original is wrapped[name].__wrapped__
        assert original.__module__ in (
            "transformers.generation.utils",
            "transformers.pipelines.base",
        )
    assert not hasattr(transformers, "MLPSpeculatorPreTrainedModel")
    hf_specdec.disable()
    with pytest.raises(Exception, match="."):
        target.generate(**prompts(1), assistant_model=make_speculator(), max_new_tokens=4)
    hf_specdec.enable()
    hf_specdec.enable()
    for name in SEAMS:
        again = getattr(integration._owner(name), name)
        assert again.__wrapped__.__module__.startswith("transformers")
    output: Any = target.generate(
        **prompts(1),
        assistant_model=make_speculator(),
        max_new_tokens=4,
        return_dict_in_generate=True,
    )
    assert isinstance(output, GenerateDecoderOnlyOutput)
    output = vars(output)
    assert output["speculation"].num_target_forwards > 0


def test_other_assistants_and_plain_calls_run_transformers_own_code(target, prompts):
    inputs = prompts(1)
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    assistant = copy.deepcopy(target)
    theirs = target.generate(
        **inputs,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=assistant,
        return_dict_in_generate=True,
    )
    assert torch.equal(plain, theirs.sequences)
    assert not hasattr(theirs, "speculation")
    assert drafter_for(assistant) is None
    with pytest.raises(ValueError, match="row_seeds"):
        target.generate(**inputs, max_new_tokens=2, row_seeds=[1])


def test_drafters_work_in_transformers_own_loop(target, make_speculator, prompts):
    """The CandidateGenerator contract: same text, and the drafts our own loop would propose."""
    inputs, speculator = prompts(1), make_speculator()
    drafts: dict[str, list[list[int]]] = {"ours": [], "theirs": []}
    propose = type(speculator).propose

    def run(which):
        def watch(self, *args, **kwargs):
            drafts[which].append(propose(self, *args, **kwargs)[0].tolist())
            return torch.tensor([drafts[which][-1]])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(speculator), "propose", watch)
            if which == "theirs":
                original = integration._originals["_assisted_decoding"]

                def theirs(self, *args, speculation_options=None, **kwargs):
                    return original(self, *args, **kwargs)

                patch.setattr(GenerationMixin, "_assisted_decoding", theirs)
            return target.generate(
                **inputs, max_new_tokens=24, do_sample=False, assistant_model=speculator
            )

    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(run("ours"), plain)
    assert torch.equal(run("theirs"), plain)
    # Both read the same state at every step, so they draft the same tokens; ours drafts fewer at
    # the length limit.
    common = [d for d in drafts["ours"] if len(d) == 4]
    assert len(common) > 10
    assert drafts["theirs"][: len(common)] == common


class TestNumberOfDraftTokens:
    def run(self, target, prompts, speculator, **kwargs):
        output = target.generate(
            **prompts(1),
            assistant_model=speculator,
            max_new_tokens=12,
            do_sample=False,
            return_dict_in_generate=True,
            **kwargs,
        )
        return len(output.speculation.accepted_per_position)

    def test_the_checkpoint_decides_when_nobody_else_does(self, target, prompts, make_speculator):
        assert self.run(target, prompts, make_speculator(n_predict=3)) == 3

    def test_precedence(self, target, prompts, make_speculator):
        speculator = make_speculator()
        attached = {"speculative_config": {"num_speculative_tokens": 3}}
        assert self.run(target, prompts, speculator, **attached) == 3
        speculator.generation_config = GenerationConfig(num_assistant_tokens=2)
        assert self.run(target, prompts, speculator, **attached) == 2
        config = copy.deepcopy(target.generation_config)
        config.num_assistant_tokens = 4
        assert self.run(target, prompts, speculator, generation_config=config) == 4
        assert self.run(target, prompts, speculator, num_assistant_tokens=1) == 1

    def test_none_decodes_plainly(self, target, prompts, make_speculator):
        assert self.run(target, prompts, make_speculator(), num_assistant_tokens=0) == 0


class TestAttach:
    @pytest.fixture
    def own(self, target):
        return copy.deepcopy(target)

    def test_plain_generate_speculates_until_detached(self, own, make_speculator, prompts):
        plain = own.generate(**prompts(3), max_new_tokens=10, do_sample=False)
        config = {"model": make_speculator(), "num_speculative_tokens": 2}
        assert hf_specdec.attach(own, config) is own
        output = own.generate(
            **prompts(3), max_new_tokens=10, do_sample=False, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain)
        assert len(output.speculation.accepted_per_position) == 2
        hf_specdec.detach(own)
        hf_specdec.detach(own)
        output = own.generate(**prompts(1), max_new_tokens=4, return_dict_in_generate=True)
        assert not hasattr(output, "speculation")

    def test_a_folder_is_loaded_in_the_targets_dtype(self, own, make_speculator, prompts, tmp_path):
        make_speculator().save_pretrained(tmp_path)
        own.to(torch.bfloat16)
        hf_specdec.attach(own, {"method": "mlp_speculator", "model": str(tmp_path)})
        output = own.generate(**prompts(1), max_new_tokens=4, return_dict_in_generate=True)
        assert output.speculation.num_drafts > 0

    def test_beams_run_as_if_nothing_were_attached(self, own, make_speculator, prompts):
        plain = own.generate(**prompts(2), max_new_tokens=6, num_beams=2)
        hf_specdec.attach(own, {"model": make_speculator()})
        assert torch.equal(own.generate(**prompts(2), max_new_tokens=6, num_beams=2), plain)

    @pytest.mark.parametrize(
        ("config", "match"),
        [
            ({}, "has no model"),
            ({"method": "medusa"}, r"method='medusa'.*\['mlp_speculator', 'mtp', 'ngram'\]"),
            ({"modle": "x"}, r"keys \['modle'\].*'model'"),
            ("{not json", "is not JSON"),
            ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
            ({"verification": "maybe"}, "verification='maybe'"),
        ],
    )
    def test_wrong_configs(self, own, config, match):
        with pytest.raises(ValueError, match=match):
            hf_specdec.attach(own, config)
        assert "generate" not in own.__dict__

    def test_drafters_that_dont_fit(self, own, make_speculator):
        for config, match in (
            ({"model": make_speculator(emb_dim=48)}, "emb_dim=48"),
            ({"model": make_speculator(), "num_speculative_tokens": 9}, "from 0 to 4"),
            ({"model": copy.deepcopy(own)}, "no drafter for"),
        ):
            with pytest.raises(ValueError, match=match):
                hf_specdec.attach(own, config)
            assert "generate" not in own.__dict__


def test_several_sampled_sequences_for_a_prompt(target, make_speculator, prompts):
    output = target.generate(
        **prompts(2),
        assistant_model=make_speculator(),
        do_sample=True,
        num_return_sequences=3,
        row_seeds=[1, 2, 1, 1, 2, 3],
        max_new_tokens=12,
    )
    assert output.shape[0] == 6
    assert torch.equal(output[0], output[2])
    assert not torch.equal(output[0], output[1])


def test_own_drafters_can_be_passed_themselves(target, prompts):
    answers = row_by_row(target, prompts(1), max_new_tokens=12, do_sample=False)
    output = target.generate(
        **prompts(1),
        assistant_model=ScriptedDrafter(answers),
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.speculation.acceptance_rate == 1.0
