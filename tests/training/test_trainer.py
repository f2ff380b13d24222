"""Training learns what there is to learn, notices wrong data, and resumes exactly."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.training import StageSettings, Trainer, preset

HEADS = 2
SETTINGS = preset(
    "small",
    learning_rate=1e-2,
    distill_top_k=2,
    precision="fp32",
    held_out_every=5,
    evaluate_every=20,
    checkpoint_every=10,
    save_dtype="float32",
    self_generated=StageSettings(steps=150, batch_size=128),
    ground_truth=StageSettings(steps=20, batch_size=128),
)


def speculator(**changes) -> MLPSpeculatorPreTrainedModel:
    torch.manual_seed(1)
    fields = {"vocab_size": 12, "emb_dim": 24, "inner_dim": 48, "n_predict": HEADS, **changes}
    return MLPSpeculatorPreTrainedModel(MLPSpeculatorConfig(**fields))


def train(directory, corpus, settings=SETTINGS, model=None, **corpora):
    model = speculator() if model is None else model
    trainer = Trainer(model, settings, directory, self_generated=corpus, progress=False, **corpora)
    return trainer, trainer.train()


def log(directory) -> list[dict]:
    lines = (directory / "training" / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_sampled": 6, "num_frequent": 4},
        {"objective": "cross_entropy"},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_a_learnable_target_is_learned(markov_corpus, tmp_path, changes):
    trainer, result = train(tmp_path, markov_corpus(), replace(SETTINGS, **changes))
    untrained = trainer.held_out.measure(speculator(), bf16=False)
    assert untrained.mean_acceptance_length < 1.6
    assert result.best.mean_acceptance_length > 2.2
    assert trainer.held_out.greedy_text
    first, last = log(tmp_path)[0], log(tmp_path)[-1]
    assert sum(last["head_losses"]) < sum(first["head_losses"])
    assert (first["step"], last["step"], last["stage"]) == (20, 150, "self_generated")


def test_states_of_the_wrong_position_are_noticed(markov_corpus, tmp_path):
    """The state one token too early hides a token that the next ones depend on."""
    _, right = train(tmp_path / "right", markov_corpus(greedy=False))
    _, wrong = train(tmp_path / "wrong", markov_corpus(shift=1, greedy=False))
    assert wrong.best.per_position[0] < 0.6 * right.best.per_position[0]
    assert wrong.best.mean_acceptance_length < right.best.mean_acceptance_length - 0.5


def test_the_saved_speculator_is_the_measured_one(markov_corpus, tmp_path):
    model = speculator(base_model_name_or_path="a/target", tie_weights=True)
    trainer, result = train(tmp_path, markov_corpus(), model=model)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.config.base_model_name_or_path == "a/target"
    assert loaded.config.tie_weights
    assert trainer.held_out.measure(loaded, bf16=False) == result.best
    assert max(entry["mean_acceptance_length"] for entry in log(tmp_path)) == pytest.approx(
        result.best.mean_acceptance_length, abs=1e-4
    )


def test_saved_dtype(markov_corpus, tmp_path):
    settings = replace(SETTINGS, save_dtype="bfloat16", self_generated=StageSettings(steps=2))
    trainer, _ = train(tmp_path, markov_corpus(), settings)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert trainer.model.dtype == torch.float32


@pytest.mark.parametrize("stop", [10, 25, 47])
def test_resumed_equals_uninterrupted(markov_corpus, tmp_path, stop):
    """Through both stages, with sampled softmax; 25 loses five steps, 47 is in stage two."""
    settings = replace(
        SETTINGS,
        num_sampled=5,
        num_frequent=3,
        self_generated=StageSettings(steps=40, batch_size=100),
    )
    corpora = {"ground_truth": markov_corpus(source="ground_truth", num_documents=30)}
    corpus = markov_corpus()
    whole, expected = train(tmp_path / "whole", corpus, settings, **corpora)
    assert [entry["stage"] for entry in log(tmp_path / "whole")] == [
        "ground_truth",
        "self_generated",
        "self_generated",
    ]

    def interrupt(step: int) -> None:
        if step == stop:
            raise KeyboardInterrupt

    cut = tmp_path / "cut"
    arguments = {"self_generated": corpus, "progress": False, **corpora}
    with pytest.raises(KeyboardInterrupt):
        Trainer(speculator(), settings, cut, **arguments).train(on_step=interrupt)
    resumed = Trainer(speculator(), settings, cut, **arguments)
    steps: list[int] = []
    assert resumed.train(on_step=steps.append) == expected
    assert steps[0] == stop // 10 * 10 + 1
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert log(cut) == log(tmp_path / "whole")
    # A finished run is finished: nothing is trained.
    again: list[int] = []
    assert Trainer(speculator(), settings, cut, **arguments).train(on_step=again.append) == expected
    assert again == []


def test_a_checkpoint_of_other_settings_is_refused(markov_corpus, tmp_path):
    short = replace(SETTINGS, self_generated=StageSettings(steps=10))
    train(tmp_path, markov_corpus(), short)
    with pytest.raises(ValueError, match=r"made with other settings.*resume=False"):
        train(tmp_path, markov_corpus(), replace(short, learning_rate=1e-3))
    with pytest.raises(ValueError, match="made with other model"):
        train(tmp_path, markov_corpus(), short, model=speculator(inner_dim=40))
    trainer = Trainer(
        speculator(),
        replace(short, learning_rate=1e-3),
        tmp_path,
        self_generated=markov_corpus(),
        progress=False,
    )
    assert trainer.train(resume=False).steps == 10


def test_patience_ends_the_run(markov_corpus, tmp_path):
    settings = replace(SETTINGS, learning_rate=0.0, patience=2)
    _, result = train(tmp_path, markov_corpus(), settings)
    assert result.stopped_early
    assert (result.best_step, result.steps) == (20, 60)


def test_a_loss_that_is_not_finite(markov_corpus, tmp_path):
    model = speculator()
    with torch.no_grad():
        next(model.speculator.proj.parameters())[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="loss at step 0 is nan"):
        train(tmp_path, markov_corpus(), model=model)


def test_reduced_vocabulary_leaves_the_others_out(markov_corpus, tmp_path):
    model = speculator(draft_vocab_size=6)
    ids = torch.tensor([0, 2, 4, 5, 9, 11])
    model.set_draft_token_ids(ids)
    trainer, result = train(tmp_path, markov_corpus(), model=model)
    index = trainer.held_out.index
    expressible = torch.isin(trainer.held_out.corpus.tokens[index + 2], ids).float().mean()
    assert 0.8 * expressible < result.best.per_position[0] <= expressible


@pytest.mark.parametrize(
    ("changes", "model", "match"),
    [
        ({}, {"emb_dim": 16}, "hidden_size=24 .* emb_dim=16"),
        ({}, {"vocab_size": 11}, "vocab_size=12"),
        ({"distill_top_k": 3}, {}, "distill_top_k=3, but self_generated keeps top_k=2"),
    ],
)
def test_corpus_of_another_target(markov_corpus, tmp_path, changes, model, match):
    with pytest.raises(ValueError, match=match):
        train(tmp_path, markov_corpus(), replace(SETTINGS, **changes), speculator(**model))


def test_other_refusals(markov_corpus, tmp_path):
    with pytest.raises(ValueError, match="give a corpus"):
        train(tmp_path, None)
    with pytest.raises(ValueError, match=r"model must be float32, got torch\.bfloat16"):
        train(tmp_path, markov_corpus(), model=speculator().bfloat16())
    corpus = markov_corpus()
    corpus.flag[:] = False
    with pytest.raises(ValueError, match="self_generated has no flagged token"):
        train(tmp_path, corpus)
