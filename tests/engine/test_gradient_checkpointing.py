"""Targets as training leaves them: gradient checkpointing, training mode, dropout."""

import copy
import logging

import pytest
import torch
from tiny_models import ScriptedDrafter, _target, row_by_row, sometimes_wrong

NEW = 10


@pytest.fixture
def trained(make_target):
    """``trained(family, **config)``: a copy, with checkpointing on, in training mode."""

    def make(family: str = "llama", **config):
        model = copy.deepcopy(_target(family))
        model.gradient_checkpointing_enable()
        return model.train()

    return make


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode"])
def test_checkpointing_that_stays_on_for_evaluation(family, trained, prompts):
    model, inputs = trained(family).eval(), prompts(3)
    texts = row_by_row(model, inputs, max_new_tokens=NEW, do_sample=False)
    output = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
    )  # fmt: skip
    assert output.sequences[:, inputs["input_ids"].shape[1] :].tolist() == texts
    assert output.speculation.mean_acceptance_length > 1.3
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode"])
def test_checkpointing_in_training_mode(family, trained, prompts, make_speculator):
    import hf_specdec

    model = trained(family)
    match = r"training mode with gradient checkpointing.*model\.eval\(\)"
    with pytest.raises(ValueError, match=match):
        model.generate(**prompts(1), max_new_tokens=3, assistant_model=make_speculator())
    with pytest.raises(ValueError, match=match):
        hf_specdec.attach(model, {"model": make_speculator()})


def test_training_mode_without_dropout_is_no_different(trained, prompts, caplog):
    model, inputs = trained(), prompts(2)
    model.gradient_checkpointing_disable()
    assert model.training
    plain = _target("llama").generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with caplog.at_level(logging.WARNING):
        ours = model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False,
            assistant_model=ScriptedDrafter([[0]] * 2), num_assistant_tokens=0,
        )  # fmt: skip
    assert torch.equal(ours, plain) and "dropout" not in caplog.text


@pytest.mark.parametrize("where", ["attention", "module"])
def test_dropout_is_warned_of(where, trained, prompts, monkeypatch, make_speculator):
    from hf_specdec.targets import training_mode

    said: list[str] = []
    monkeypatch.setattr(training_mode.logger, "warning_once", said.append)
    model = trained("gpt_bigcode" if where == "module" else "llama")
    model.gradient_checkpointing_disable()
    if where == "attention":
        model.config.attention_dropout = 0.1
    arguments = {**prompts(1), "max_new_tokens": 3, "assistant_model": make_speculator()}
    model.generate(**arguments)
    assert len(said) == 1 and "in training mode, and its dropout" in said[0]
    model.eval().generate(**arguments)
    assert len(said) == 1
