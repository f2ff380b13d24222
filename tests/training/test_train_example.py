"""The examples, end to end, with a tiny Llama in place of SmolLM2."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import hf_specdec

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_smollm2_drafter.py"


@pytest.fixture
def example(monkeypatch):
    # As when it is run as a script: its folder is on the path.
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("train_smollm2_drafter", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["mlp", "mtp"])
def test_smoke(kind, example, target, tokenizer, tmp_path, capsys):
    arguments = ["--smoke", "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "out")]
    result = example.main(arguments, lambda: (target, tokenizer), kind)
    printed = capsys.readouterr().out
    assert f"{result.best.mean_acceptance_length:.2f}" in printed
    prompt = torch.tensor([[1, 3, 2, 1, 4, 20]])
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(prompt, **settings)
    if kind == "mlp":
        drafter = AutoModel.from_pretrained(tmp_path / "out")
        assert drafter.config.base_model_name_or_path == example.DEMO_NAME
        output = target.generate(prompt, assistant_model=drafter.float(), **settings)
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        hf_specdec.attach(model, {"method": "mtp", "num_speculative_tokens": 1})
        output = model.generate(prompt, **settings)
    assert torch.equal(output, plain)
    # Started again, it only reports.
    assert example.main(arguments, lambda: (target, tokenizer), kind) == result
