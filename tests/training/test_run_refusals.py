"""What a run refuses, by the argument's name; the command's own refusals are tested with it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_specdec.modeling.mimo import mimo_from_decoder
from hf_specdec.training import (
    CorpusSettings,
    MTPTrainer,
    NetworkSettings,
    PromptScripts,
    TrainingRun,
    generate_corpus,
    new_speculator,
    preset,
    recipe,
    save_speculator,
    train_drafter,
)
from hf_specdec.training.parallel import Processes
from hf_specdec.training.plot import plot_log
from hf_specdec.training.result import RESULT_FILE, read_result, write_result
from hf_specdec.training.sole_run import sole_run


@pytest.mark.parametrize(
    ("settings", "values", "match"),
    [
        (CorpusSettings, {"text_tokens": -1}, "text_tokens=-1 must not be negative"),
        (CorpusSettings, {"tokens": -1}, "tokens=-1 must not be negative"),
        (CorpusSettings, {"rows": 0}, "rows=0 must be at least 1"),
        (NetworkSettings, {"heads": 0}, "heads=0 must be at least 1"),
        (NetworkSettings, {"draft_vocab_size": -1}, "draft_vocab_size=-1 must not be negative"),
        (NetworkSettings, {"initialize": "zeros"}, "initialize='zeros' must be 'target' or"),
        (lambda **values: preset("small", **values), {"accumulation": 0}, "accumulation=0 must"),
        (lambda **values: preset("small", **values), {"head_weights": ()}, "one number for each"),
    ],
)
def test_settings_out_of_range(settings, values, match):
    with pytest.raises(ValueError, match=match):
        settings(**values)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"sample_top_k": 9}, "sample_top_k=9 must be 1 to top_k=4"),
        ({"round_size": 0}, "round_size=0 must be at least 1"),
    ],
)
def test_generation(target, tmp_path, values, match):
    scripts = PromptScripts([[1, 4]])
    with pytest.raises(ValueError, match=match):
        generate_corpus(target, scripts, tmp_path, 10, stop_ids=[], top_k=4, **values)


def run(tmp_path: Path, kind: Any = "mlp", **changes: Any) -> TrainingRun:
    chosen = recipe("small", kind)
    corpus = replace(chosen.corpus, tokens=changes.pop("tokens", 2000), answer_tokens=20, rows=4)
    chosen = replace(chosen, corpus=corpus, network=replace(chosen.network, inner_dim=16))
    return TrainingRun(kind, tmp_path / "out", chosen, progress=False, **changes)


def test_nothing_to_generate_from(target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="tokens=None needs a time budget"):
        train_drafter(run(tmp_path, tokens=None), target, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template, so the target can't write its own"):
        train_drafter(run(tmp_path), target, tokenizer)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_run_trains_in(target, tokenizer, tmp_path):
    with (
        sole_run(tmp_path / "out", Processes("cpu")),
        pytest.raises(ValueError, match=r"out='.*' is being written by another run"),
    ):
        train_drafter(run(tmp_path), target, tokenizer)


def test_corpora_of_several_processes(target, tokenizer, tmp_path):
    (tmp_path / "out" / "corpora" / "chat" / "process-0-of-2").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"was begun by 2 processes, not 1; .*tokens=0"):
        train_drafter(run(tmp_path), target, tokenizer)


def test_speculators_that_can_not_be_continued(make_speculator, target, tokenizer, tmp_path):
    save_speculator(make_speculator(emb_dim=16), tmp_path / "narrow")
    with pytest.raises(ValueError, match="target with hidden size 16 .* this one has 32"):
        train_drafter(run(tmp_path, continue_from=str(tmp_path / "narrow")), target, tokenizer)
    target.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="is a LlamaModel; an MLP speculator is needed"):
        train_drafter(run(tmp_path, continue_from=str(tmp_path / "llama")), target, tokenizer)


@pytest.mark.parametrize(
    ("feed", "match"),
    [
        ("post_norm", "made for another target: its decoder has other weights"),
        ("pre_norm", "has mtp_feed='pre_norm'; only layers with 'post_norm'"),
    ],
)
def test_layers_that_can_not_be_continued(feed, match, target, tokenizer, tmp_path):
    # The same sizes, other weights.
    other = LlamaForCausalLM(target.config)
    mimo_from_decoder(other, mtp_feed=feed).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=match):
        wanted = run(tmp_path, "mtp", continue_from=str(tmp_path / "other"))
        train_drafter(wanted, target, tokenizer)


def test_new_speculator(target):
    with pytest.raises(ValueError, match="initialize='zeros' must be"):
        new_speculator(target, initialize="zeros")  # type: ignore[arg-type]


def test_evaluated_drafts(target, tmp_path):
    with pytest.raises(ValueError, match="num_evaluated_drafts=0 must be at least 1"):
        MTPTrainer(mimo_from_decoder(target), preset("small"), tmp_path, num_evaluated_drafts=0)


def test_several_processes_need_accelerate(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"hf-specdec\[train\]"):
        Processes("cpu")


def test_curve_and_result(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"log\.jsonl is missing"):
        plot_log(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"result\.json is missing"):
        read_result(tmp_path)
    with pytest.raises(ValueError, match="must have the keys"):
        write_result(tmp_path, {"kind": "mlp"})
    (tmp_path / "training").mkdir()
    (tmp_path / RESULT_FILE).write_text(json.dumps({"format_version": 9}))
    with pytest.raises(ValueError, match="format_version=9, this release reads 1"):
        read_result(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hf-specdec\[train\]"):
        plot_log(tmp_path)
