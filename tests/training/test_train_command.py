"""`hf-specdec train`, from data to the folder that generates."""

import json
import re
from pathlib import Path

import pytest
import torch
from training_command import jsonl, words
from transformers import AutoModel, AutoModelForCausalLM

import hf_specdec
from hf_specdec.training import Corpus
from hf_specdec.training.parallel import Processes
from hf_specdec.training.result import read_result
from hf_specdec.training.sole_run import sole_run


def check(result, failed: bool = False) -> str:
    text = " ".join(result.output.split())
    assert (result.exit_code != 0) == failed, text
    return text


def same_text(target, drafter) -> None:
    prompt = torch.tensor([[1, 3, 2, 1, 4, 20]])
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(prompt, **settings)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **settings), plain)


def test_mlp_on_what_the_target_asks_itself(train, target, tmp_path):
    out = tmp_path / "out"
    printed = check(train("--out", out, "--target-name", "a/target"))
    assert "mean acceptance length" in printed
    drafter = AutoModel.from_pretrained(out)
    assert drafter.config.base_model_name_or_path == "a/target"
    assert (drafter.config.n_predict, drafter.config.inner_dim) == (2, 24)
    assert drafter.config.share_target_weights
    same_text(target, drafter.float())
    corpus = Corpus(out / "corpora" / "chat")
    assert 3000 <= len(corpus) < 4500
    values = read_result(out)
    best = values["acceptance"]
    assert f"{best['mean_acceptance_length']:.2f}" in printed
    log = [json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [10, 20, 30]
    assert [entry["tokens_trained"] for entry in log] == [640, 1280, 1920]
    assert best["mean_acceptance_length"] == pytest.approx(
        max(entry["mean_acceptance_length"] for entry in log), abs=1e-4
    )
    assert values["training"]["tokens_trained"] == 1920
    assert values["data"]["corpora"][0]["tokens"] == len(corpus)
    assert values["network"]["num_parameters"] == sum(p.numel() for p in drafter.parameters())
    assert (out / "training" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tokenizer.json").exists()


def test_mtp_shares_the_corpus(train, target, tmp_path):
    corpora = tmp_path / "corpora"
    check(train("--out", tmp_path / "mlp", "--corpus", corpora))
    written = sorted((corpora / "chat").glob("part-*"))
    times = [path.stat().st_mtime_ns for path in written]
    options = ["--kind", "mtp", "--batch-size", "2", "--steps", "10", "--sampled-softmax", "20"]
    check(train("--out", tmp_path / "mtp", "--corpus", corpora, *options))
    assert [path.stat().st_mtime_ns for path in sorted((corpora / "chat").glob("part-*"))] == times
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mtp", dtype=torch.float32)
    # Two passes are trained, three drafts are measured.
    assert len(read_result(tmp_path / "mtp")["acceptance"]["per_position"]) == 3
    prompt = torch.tensor([[1, 3, 2, 1, 4, 20]])
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(prompt, **settings)
    hf_specdec.attach(model, {"method": "mtp", "num_speculative_tokens": 1})
    assert torch.equal(model.generate(prompt, **settings), plain)


def test_a_corpus_that_grows_does_not_change_a_run(train, tmp_path):
    corpora = tmp_path / "corpora"
    first = ["--out", tmp_path / "first", "--corpus", corpora]
    check(train(*first))
    before = read_result(tmp_path / "first")
    check(train("--out", tmp_path / "second", "--corpus", corpora, "--tokens", "6000"))
    assert read_result(tmp_path / "second")["data"]["corpora"][0]["tokens"] >= 6000
    # What was interrupted goes on with what it had.
    (tmp_path / "first" / "training" / "result.json").unlink()
    check(train(*first))
    after = read_result(tmp_path / "first")
    assert (before["acceptance"], before["data"]) == (after["acceptance"], after["data"])
    # Nor when it is started with other numbers.
    text = check(train(*first, "--tokens", "9000"), failed=True)
    assert "begun with corpus.tokens=3000, not 9000" in text


def test_what_was_too_little_can_be_more(train, tmp_path):
    """Nothing is decided before training begins."""
    out = ["--out", tmp_path / "out", "--rows", "4", "--held-out-every", "9"]
    text = check(train(*out, "--tokens", "0"), failed=True)
    assert "holds no corpus to train on" in text
    text = check(train(*out, "--tokens", "100"), failed=True)
    assert "holds out no document of 4" in text
    check(train(*out, "--tokens", "3000"))


def test_both_stages_on_texts(train, tmp_path):
    texts = jsonl(tmp_path / "t.jsonl", [{"text": words(i, 90)} for i in range(60)])
    options = ["--data", texts, "--text-tokens", "1500", "--steps", "20"]
    check(train("--out", tmp_path / "out", *options))
    log = (tmp_path / "out" / "training" / "log.jsonl").read_text()
    assert '"stage": "ground_truth"' in log and '"stage": "self_generated"' in log
    own = Corpus(tmp_path / "out" / "corpora" / "prompts")
    # Each begins with a piece of a text.
    first = own.tokens[own.document == 0][:64].tolist()
    assert first == list(range(first[0], first[0] + len(first))) or len(set(first)) > 40
    stages = {entry["stage"] for entry in read_result(tmp_path / "out")["data"]["corpora"]}
    assert stages == {"ground_truth", "self_generated"}


def test_ibm_keeps_its_format(train, tmp_path):
    texts = jsonl(tmp_path / "t.jsonl", [{"text": words(i, 200)} for i in range(30)])
    options = [
        "--preset",
        "ibm",
        "--data",
        texts,
        "--text-tokens",
        "1000",
        "--answer-tokens",
        "256",
    ]
    options += ["--text-steps", "20"]
    check(train("--out", tmp_path / "out", *options))
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert config.tie_weights and config.scale_input and not config.share_target_weights
    assert config.draft_vocab_size == 0
    settings = read_result(tmp_path / "out")["data"]["corpora"][1]["settings"]
    assert settings["sample_top_k"] == 10
    assert settings["scripts"]["max_new_tokens"] == 256
    assert settings["scripts"]["temperatures"] == {"greedy_share": 0.0, "low": 1.0, "high": 1.0}


def test_a_time_budget_is_kept_and_what_it_decided(train_as_given, tmp_path):
    out = tmp_path / "out"
    options = ["--out", out, "--time-budget", "0.07", "--rows", "4"]
    small = ["--dtype", "float32", "--device", "cpu", "--precision", "fp32", "--batch-size", "32"]
    small += ["--inner-dim", "16", "--held-out-every", "4", "--answer-tokens", "40"]
    check(train_as_given(*small, *options))
    values = read_result(out)["training"]
    assert 0 < values["seconds"]["generation"] < 0.07 * 60
    plan = json.loads((out / "training" / "plan.json").read_text())["decided"]
    assert values["steps"] <= plan["steps"]
    tokens = len(Corpus(out / "corpora" / "chat"))
    # Started again it does not generate again, nor plan again.
    check(train_as_given(*small, *options))
    assert len(Corpus(out / "corpora" / "chat")) == tokens
    text = check(train_as_given(*small, *options, "--time-budget", "5"), failed=True)
    assert "begun with time_budget=0.07, not 5.0" in text


def test_continued_from_an_accelerator(train, train_as_given, tmp_path):
    first, corpora = tmp_path / "first", tmp_path / "corpora"
    check(train("--out", first, "--corpus", corpora))
    options = ["--out", tmp_path / "next", "--corpus", corpora, "--continue-from", first]
    text = check(train(*options), failed=True)
    assert "keeps the drafter's shape, so leave out --heads, --inner-dim" in text
    options += ["--steps", "1", "--learning-rate", "0", "--tokens", "0", "--dtype", "float32"]
    check(train_as_given(*options, "--precision", "fp32", "--held-out-every", "4"))
    best, after = read_result(first)["acceptance"], read_result(tmp_path / "next")["acceptance"]
    assert after["per_position"] == pytest.approx(best["per_position"], abs=0.02)
    values = read_result(tmp_path / "next")
    assert values["training"]["continued_from"] == str(first)
    # It keeps its shape, which is not the preset's.
    assert (values["network"]["heads"], values["network"]["inner_dim"]) == (2, 24)


def test_an_mtp_layer_is_continued(train, target_folder, tmp_path):
    first, corpora = tmp_path / "first", tmp_path / "corpora"
    mtp = ["--kind", "mtp", "--batch-size", "2", "--sampled-softmax", "20", "--corpus", corpora]
    check(train("--out", first, *mtp, "--steps", "20"))
    options = ["--out", tmp_path / "next", "--continue-from", first, "--learning-rate", "0"]
    check(train(*mtp, *options, "--steps", "1"))
    best, after = read_result(first)["acceptance"], read_result(tmp_path / "next")["acceptance"]
    assert after["per_position"] == pytest.approx(best["per_position"], abs=0.02)
    text = check(
        train(*mtp, "--out", tmp_path / "x", "--continue-from", target_folder), failed=True
    )
    assert "LlamaForCausalLM without MTP layers" in text


CHAT = [{"messages": [{"role": "user", "content": words(i, 2)}]} for i in range(40)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": ""}, {"text": " "}], [], "the data has no text"),
        ([{"body": "w1", "id": 3}], [], "none of the data's columns .* name one of body, id"),
        ([{"text": "w1"}], ["--text-column", "txt"], "no column 'txt'; it has text"),
        ([{"text": 3}], ["--text-column", "text"], "row 0, column 'text' is int"),
        ([{"text": "w1 w2"}], [], "gives no prompt: .* must have 64 tokens"),
        ([{"messages": "hello"}], [], "row 0, column 'messages' holds no conversation"),
        ([{"prompt": "w1"}], ["--text-tokens", "9"], "'prompt' holds prompts, and stage 1 needs"),
        (CHAT, ["--heads", "40", "--answer-tokens", "40"], "heads=40 .* answer_tokens=40"),
        (
            [{"text": words(0, 65)}] * 40,
            ["--text-tokens", "9", "--tokens", "0", "--heads", "64"],
            "no position followed by 64 tokens",
        ),
        (CHAT, ["--batch-size", "64", "--accumulation", "3"], "64 can't be divided .* of 3"),
        (CHAT, ["--head-weights", "1,x"], "--head-weights '1,x' must be numbers"),
        (CHAT, ["--head-weights", "1"], "head_weights has 1 numbers, but there are 2 heads"),
        (CHAT, ["--head-weights=-1,1"], "none of them negative"),
        (CHAT, ["--text-column", "a", "--prompt-column", "b"], "give one column"),
        (CHAT, ["--preset", "ibm", "--kind", "mtp"], "recipe of an MLP speculator"),
        (CHAT, ["--time-budget", "0"], "time_budget=0.0 must be a positive"),
        (CHAT, ["--tokens", "0"], "holds no corpus to train on"),
    ],
)
def test_bad_input(train, tmp_path, rows, options, message):
    data = jsonl(tmp_path / "data.jsonl", rows)
    result = train("--out", tmp_path / "out", "--data", data, *options)
    text = check(result, failed=True)
    assert re.search(message, text), text
    assert "Traceback" not in text


def test_other_refusals(train, tmp_path):
    text = check(train("--out", tmp_path / "o", "--data", "missing.jsonl"), failed=True)
    assert "'missing.jsonl' is neither a file or folder here" in text
    text = check(train("--out", tmp_path / "o", "--text-tokens", "10"), failed=True)
    assert "text_tokens=10 needs texts" in text
    text = check(train("--out", tmp_path / "o", "--text-column", "a"), failed=True)
    assert "no --data that has it" in text
    (tmp_path / "picture.png").touch()
    text = check(train("--out", tmp_path / "o", "--data", tmp_path / "picture.png"), failed=True)
    assert "can't be read; its name must end in .txt" in text


def test_a_folder_that_another_run_trains_in(train, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_specdec.cli.train.load_target", lambda *_: pytest.fail("loaded"))
    with sole_run(tmp_path / "out", Processes("cpu")):
        text = check(train("--out", tmp_path / "out"), failed=True)
    assert "out' is being written by another run (process" in text
    assert "or name another folder (--out)" in text


def test_a_folder_of_another_target(train, make_target, tokenizer, tmp_path):
    out, corpora = tmp_path / "out", tmp_path / "corpora"
    check(train("--out", out, "--corpus", corpora, "--target-name", "same"))
    target = tmp_path / "target"
    model = make_target("qwen3")
    model.save_pretrained(target)
    # The same sizes and the same name, but other weights.
    text = check(train("--out", out, "--target-name", "same"), failed=True)
    assert "begun with target=" in text
    other = ["--out", tmp_path / "new", "--corpus", corpora, "--target-name", "same"]
    text = check(train(*other), failed=True)
    assert "was made with another target: target_weights" in text
    text = check(train("--kind", "mtp", "--out", tmp_path / "m"), failed=True)
    assert "can't add a layer to a Qwen3ForCausalLM" in text and "kind='mlp'" in text


def test_states_that_do_not_fit_on_the_disk(train, tmp_path, monkeypatch):
    from hf_specdec.training import disk_space

    def free(tokens: int) -> None:
        number = 2**31 + tokens
        monkeypatch.setattr(disk_space, "free_bytes", lambda directory: number)

    free(100_000)
    out = ["--out", tmp_path / "out", "--tokens", "5000"]
    text = check(train(*out, "--keep-states"), failed=True)
    assert "5,000 tokens with their hidden states need 0.0 GiB (261 bytes each)" in text
    assert "; 383 tokens fit: lower --tokens" in text and "--no-keep-states" in text
    text = check(train(*out), failed=True)
    assert "without their hidden states" in text and "(197 bytes each)" in text
    assert not list(Path(tmp_path / "out").rglob("part-*"))
    # Room for the tokens only: the target is run again in training.
    free(1_100_000)
    check(train(*out))
    assert not Corpus(tmp_path / "out" / "corpora" / "chat").has_states
    again = ["--out", tmp_path / "again", "--corpus", tmp_path / "out" / "corpora"]
    text = check(train(*again, "--tokens", "5000", "--keep-states"), failed=True)
    assert "begun with keep_states=False, not True" in text


@pytest.mark.parametrize("kind", ["mlp", "mtp"])
def test_states_computed_again_train_the_same_drafter(kind, train, tmp_path):
    """The order of the examples is the same where there is one block."""
    options = ["--kind", kind]
    if kind == "mtp":
        options += ["--batch-size", "2", "--steps", "10"]
    stored, again = tmp_path / "stored", tmp_path / "again"
    check(train("--out", stored, *options))
    check(train("--out", again, *options, "--no-keep-states"))
    size = sum(path.stat().st_size for path in (again / "corpora" / "chat").glob("part-*"))
    assert size < 210 * len(Corpus(again / "corpora" / "chat"))
    rates = [read_result(folder)["acceptance"]["per_position"] for folder in (stored, again)]
    assert rates[0] == pytest.approx(rates[1], abs=0.03)
