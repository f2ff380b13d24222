"""The example that trains an MTP layer, end to end, with a tiny Llama in place of SmolLM2."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_specdec

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_smollm2_mtp.py"


@pytest.fixture
def example(monkeypatch):
    # As when it is run as a script: its folder is on the path.
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("train_smollm2_mtp", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_smoke(example, target, tokenizer, tmp_path, capsys):
    arguments = ["--smoke", "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "out")]
    arguments += ["--draft-vocab", "40", "--tokens", "2000"]
    result = example.main(arguments, lambda: (target, tokenizer))
    printed = capsys.readouterr().out
    assert "40 draft ids cover" in printed
    assert f"{result.best.mean_acceptance_length:.2f}" in printed
    prompt = torch.tensor([[1, 3, 2, 1, 4, 20]])
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(prompt, **settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(model.config.mtp_draft_token_ids) == 40
    assert torch.equal(model.generate(prompt, **settings), plain)
    hf_specdec.attach(model, {"method": "mtp", "num_speculative_tokens": 2})
    output = model.generate(prompt, **settings, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.speculation.num_drafts > 0
    # Started again, with the corpus as it is and the run complete, it only reports.
    arguments[arguments.index("2000")] = "0"
    arguments += ["--everyday-tokens", "0"]
    assert example.main(arguments, lambda: (target, tokenizer)) == result


def test_sizes_that_are_given_win_over_smoke(example):
    base = ["--corpus", "c", "--out", "o", "--smoke"]
    assert example.parse_arguments(base).window == 64
    assert example.parse_arguments([*base, "--window", "5"]).window == 5
