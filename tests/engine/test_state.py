"""Nothing is left behind: calls that fail, threads, copies, one assistant for several targets."""

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from tiny_models import (
    CONFIGS,
    VOCAB_SIZE,
    ScriptedDrafter,
    new_tokens,
    row_by_row,
    sometimes_wrong,
)
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import hf_specdec

NEW = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


def fingerprint(target):
    """Everything a call could leave behind."""
    hooks = [
        (name, len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in target.named_modules()
    ]
    configs = [m.config._attn_implementation for m in target.modules() if hasattr(m, "config")]
    return hooks, configs, sorted(target.__dict__), target.training


class Breaks(LogitsProcessor):
    """Raises in its n-th call."""

    def __init__(self, after, error):
        self.left, self.error = after, error

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("after", [0, 1, 9])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_call_that_fails_leaves_nothing(error, after, target, prompts, make_speculator):
    inputs, speculator = prompts(3), make_speculator(share_target_weights=True)
    before = fingerprint(target)
    with pytest.raises(type(error)):
        target.generate(
            **inputs,
            **GREEDY,
            assistant_model=speculator,
            logits_processor=LogitsProcessorList([Breaks(after, error)]),
        )
    assert fingerprint(target) == before
    result = target.generate(**inputs, **GREEDY, assistant_model=speculator)
    assert new_tokens(result, inputs, [NEW] * 3) == row_by_row(target, inputs, **GREEDY)


def test_a_failing_forward_leaves_nothing(target, prompts, make_speculator):
    before = fingerprint(target)

    def explode(*_):
        raise MemoryError("no more")

    handle = target.model.layers[-1].register_forward_pre_hook(explode)
    with pytest.raises(MemoryError):
        target.generate(**prompts(1), **GREEDY, assistant_model=make_speculator())
    handle.remove()
    assert fingerprint(target) == before


def test_one_assistant_for_several_targets_and_calls(make_target, prompts, make_speculator):
    inputs = prompts(3)
    for fields in ({}, {"share_target_weights": True}):
        speculator = make_speculator(**fields)
        for family in ("llama", "qwen3", "llama", "mistral"):
            target = make_target(family)
            expected = row_by_row(target, inputs, **GREEDY)
            output = target.generate(
                **inputs, **GREEDY, assistant_model=speculator, return_dict_in_generate=True
            )
            assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected


def in_threads(*calls):
    """Results of calls that run at the same time, each several times."""
    results: list[list] = [[] for _ in calls]
    errors: list[Exception] = []
    barrier = threading.Barrier(len(calls))

    def work(call, out):
        try:
            barrier.wait()
            for _ in range(4):
                out.append(call())
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(calls, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return results


@pytest.mark.parametrize("shared", [False, True])
def test_two_targets_in_two_threads(shared, make_target, prompts, make_speculator):
    """With one assistant, whose borrowed tables belong to one target in each thread."""
    inputs = prompts(3)
    speculator = make_speculator(share_target_weights=shared)
    targets = [make_target("llama"), make_target("qwen3")]

    def call(target):
        output = target.generate(
            **inputs, **GREEDY, assistant_model=speculator, return_dict_in_generate=True
        )
        return output.sequences.tolist(), output.speculation.num_accepted_tokens

    alone = [call(target) for target in targets]
    for results, expected in zip(
        in_threads(*(lambda t=t: call(t) for t in targets)), alone, strict=True
    ):
        assert results == [expected] * 4


def test_one_target_in_two_threads(target, prompts):
    rows = prompts(3)
    calls, expected = [], []
    for i in range(2):
        inputs = {name: value[i : i + 1] for name, value in rows.items()}
        answers = row_by_row(target, inputs, **GREEDY)

        def call(inputs=inputs, answers=answers):
            return target.generate(
                **inputs, **GREEDY, assistant_model=ScriptedDrafter(answers, sometimes_wrong)
            ).tolist()

        calls.append(call)
        expected.append(call())
    before = fingerprint(target)
    for results, reference in zip(in_threads(*calls), expected, strict=True):
        assert results == [reference] * 4
    assert fingerprint(target) == before


class TestAttachedTargets:
    @pytest.fixture
    def attached(self, make_speculator):
        # Its own: transformers' hooks for outputs, which other tests ask for, can't be pickled.
        torch.manual_seed(7)
        target = AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval()
        target.generation_config.eos_token_id = None
        return hf_specdec.attach(target, {"model": make_speculator(share_target_weights=True)})

    def check(self, target, inputs, num_drafts=None):
        output = target.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        assert output.speculation.num_drafts > 0
        return output.sequences.tolist()

    def test_a_copy_is_another_target(self, attached, prompts):
        inputs = prompts(1)
        expected = self.check(attached, inputs)
        twin = copy.deepcopy(attached)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.5)
        assert self.check(twin, inputs) != expected
        assert self.check(attached, inputs) == expected
        hf_specdec.detach(attached)
        assert not hasattr(
            attached.generate(**inputs, **GREEDY, return_dict_in_generate=True), "speculation"
        )
        self.check(twin, inputs)

    def test_pickle_and_torch_save(self, attached, prompts):
        inputs = prompts(1)
        expected = self.check(attached, inputs)
        assert self.check(pickle.loads(pickle.dumps(attached)), inputs) == expected
        file = io.BytesIO()
        torch.save(attached, file)
        file.seek(0)
        assert self.check(torch.load(file, weights_only=False), inputs) == expected

    def test_the_assistant_is_no_part_of_the_target(self, attached, tmp_path):
        assert not any("speculator" in name for name in attached.state_dict())
        attached.save_pretrained(tmp_path)
        assert not any("speculator" in name for name, _ in attached.named_modules())


@pytest.mark.parametrize("shared", [False, True])
def test_copies_and_pickles_of_an_assistant(shared, target, prompts, make_speculator):
    inputs, speculator = prompts(3), make_speculator(share_target_weights=shared)

    def accepted(assistant):
        return target.generate(
            **inputs, **GREEDY, assistant_model=assistant, return_dict_in_generate=True
        ).speculation.accepted_per_position

    expected = accepted(speculator)
    assert accepted(copy.deepcopy(speculator)) == expected
    assert accepted(pickle.loads(pickle.dumps(speculator))) == expected
    assert accepted(speculator.to(torch.float64).to(torch.float32)) == expected


def test_grad_modes_and_training_mode(make_target, prompts, make_speculator):
    target, inputs = copy.deepcopy(make_target("llama")), prompts(2)
    speculator = make_speculator(share_target_weights=True)
    expected = row_by_row(target, inputs, **GREEDY)

    def check():
        result = target.generate(**inputs, **GREEDY, assistant_model=speculator)
        assert new_tokens(result, inputs, [NEW] * 2) == expected
        assert not result.requires_grad

    with torch.inference_mode():
        check()
    with torch.no_grad():
        check()
    check()
    target.train()
    speculator.train()
    check()
    assert target.training and speculator.training
    # Tables bound inside inference_mode can still be trained with.
    hidden = torch.randn(1, 6, target.config.hidden_size)
    ids = torch.randint(3, VOCAB_SIZE, (1, 12))
    speculator(hidden, ids, labels=ids).loss.backward()


def test_disable_in_between(target, prompts, make_speculator):
    inputs, speculator = prompts(1), make_speculator()
    expected = row_by_row(target, inputs, **GREEDY)
    generate = type(target).generate
    hf_specdec.disable()
    assert type(target).generate is not generate
    assert new_tokens(target.generate(**inputs, **GREEDY), inputs, [NEW]) == expected
    hf_specdec.enable()
    result = target.generate(**inputs, **GREEDY, assistant_model=speculator)
    assert new_tokens(result, inputs, [NEW]) == expected
