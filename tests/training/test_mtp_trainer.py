"""An MTP layer learns what there is to learn, notices a wrong feed, and resumes exactly."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoMTP, mimo_from_llama
from hf_specdec.training import (
    Corpus,
    MTPTrainer,
    PromptScripts,
    StageSettings,
    Temperatures,
    generate_corpus,
    preset,
)
from hf_specdec.training.evaluation import comparable_positions
from hf_specdec.training.mtp_evaluation import HeldOutDocuments

SETTINGS = preset(
    "small",
    learning_rate=1e-2,
    distill_top_k=2,
    precision="fp32",
    held_out_every=5,
    evaluate_every=20,
    checkpoint_every=10,
    save_dtype="float32",
    self_generated=StageSettings(steps=100, batch_size=4),
    ground_truth=StageSettings(steps=20, batch_size=4),
)


def mimo(**changes) -> MiMoForCausalLM:
    """A target whose states are as wide as those of the Markov corpus."""
    torch.manual_seed(1)
    fields: dict[str, Any] = {
        "vocab_size": 12, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3,
        "mtp_feed": "post_norm",
    }  # fmt: skip
    return MiMoForCausalLM(MiMoConfig(**{**fields, **changes}))


def make_trainer(directory, corpus, settings=SETTINGS, model=None, **options) -> MTPTrainer:
    options = {"num_draft_tokens": 2, "window_length": 36, "progress": False, **options}
    model = mimo() if model is None else model
    return MTPTrainer(model, settings, directory, self_generated=corpus, **options)


def log(directory) -> list[dict]:
    lines = (directory / "training" / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "changes", [{}, {"num_sampled": 6, "num_frequent": 4}, {"precision": "bf16"}], ids=str
)
def test_a_learnable_target_is_learned(markov_corpus, tmp_path, changes):
    trainer = make_trainer(tmp_path, markov_corpus(), replace(SETTINGS, **changes))
    untrained = trainer.held_out.measure(MiMoMTP(mimo()), bf16=False)
    result = trainer.train()
    assert untrained.mean_acceptance_length < 1.6
    first, second = result.best.per_position
    assert first > 0.85 and second > 0.75
    assert trainer.held_out.greedy_text
    before, after = log(tmp_path)[0], log(tmp_path)[-1]
    assert sum(after["head_losses"]) < sum(before["head_losses"])


def test_recycling_is_learned_by_doing_it(markov_corpus, tmp_path):
    """A layer that was trained for its first draft alone drafts a worse second one."""
    corpus = markov_corpus()
    once = make_trainer(tmp_path / "once", corpus, num_draft_tokens=1)
    once.train()
    twice = make_trainer(tmp_path / "twice", corpus)
    twice.train()
    rates = [twice.held_out.measure(t.network, bf16=False).per_position for t in (once, twice)]
    assert rates[0][0] > 0.8
    assert rates[0][1] < rates[1][1] - 0.1


def test_a_wrong_feed_is_noticed(markov_corpus, tmp_path, monkeypatch):
    """Embeddings that are not shifted hide the token on which the next one depends."""
    corpus = markov_corpus(greedy=False)
    settings = replace(SETTINGS, self_generated=StageSettings(steps=60, batch_size=4))
    right = make_trainer(tmp_path / "right", corpus, settings).train()
    shifted = MiMoMTP.embed

    def unshifted(self, token_ids, position_ids):
        return shifted(self, token_ids.roll(1, dims=1), position_ids)

    monkeypatch.setattr(MiMoMTP, "embed", unshifted)
    wrong = make_trainer(tmp_path / "wrong", corpus, settings).train()
    assert wrong.best.per_position[0] < 0.7 * right.best.per_position[0]


def test_only_the_layer_is_trained(markov_corpus, tmp_path):
    model = mimo()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    short = replace(SETTINGS, self_generated=StageSettings(steps=3, batch_size=2))
    make_trainer(tmp_path, markov_corpus(), short, model).train()
    changed = {n for n, tensor in model.state_dict().items() if not torch.equal(tensor, before[n])}
    layer = {name for name in before if ".mtp_layers." in name}
    # A bias of keys moves all scores of a query alike, so the softmax does not see it.
    assert changed <= layer and layer - changed <= {"model.mtp_layers.0.self_attn.k_proj.bias"}


def test_the_rest_may_be_in_lower_precision(markov_corpus, tmp_path):
    model = mimo().bfloat16()
    model.model.mtp_layers.float()
    settings = replace(SETTINGS, precision="bf16", save_dtype="bfloat16")
    result = make_trainer(tmp_path, markov_corpus(), settings, model).train()
    assert result.best.per_position[0] > 0.85
    assert model.lm_head.weight.dtype == torch.bfloat16
    stored = load_file(tmp_path / "training" / "best_mtp_layers.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_the_saved_layers_are_the_measured_ones(markov_corpus, tmp_path):
    trainer = make_trainer(tmp_path, markov_corpus())
    with pytest.raises(FileNotFoundError, match="call train"):
        trainer.load_best()
    result = trainer.train()
    with torch.no_grad():
        trainer.model.model.mtp_layers[0].input_proj.weight.zero_()  # type: ignore[union-attr,operator]
    trainer.load_best()
    assert trainer.held_out.measure(trainer.network, bf16=False) == result.best
    stored = load_file(tmp_path / "training" / "best_mtp_layers.safetensors")
    names = {name for name in trainer.model.state_dict() if ".mtp_layers." in name}
    assert set(stored) == names


@pytest.mark.parametrize("stop", [10, 25, 47])
def test_resumed_equals_uninterrupted(markov_corpus, tmp_path, stop):
    """Through both stages, with sampled softmax; 25 loses five steps, 47 is in stage two."""
    settings = replace(
        SETTINGS,
        num_sampled=5,
        num_frequent=3,
        self_generated=StageSettings(steps=40, batch_size=3),
    )
    options = {"ground_truth": markov_corpus(source="ground_truth", num_documents=30)}
    corpus = markov_corpus(num_documents=30)
    whole = make_trainer(tmp_path / "whole", corpus, settings, **options)
    expected = whole.train()

    def interrupt(step: int) -> None:
        if step == stop:
            raise KeyboardInterrupt

    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        make_trainer(cut, corpus, settings, **options).train(on_step=interrupt)
    resumed = make_trainer(cut, corpus, settings, **options)
    steps: list[int] = []
    assert resumed.train(on_step=steps.append) == expected
    assert steps[0] == stop // 10 * 10 + 1
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert log(cut) == log(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"made with other model.*resume=False"):
        make_trainer(cut, corpus, settings, window_length=30, **options).train()


def test_the_engine_accepts_what_was_learned(target, tmp_path):
    """A random Llama, its own texts learned by heart, and the drafts accepted in ``generate``."""
    prompts = torch.randint(3, 64, (16, 6)).tolist()
    scripts = PromptScripts(prompts, max_new_tokens=30, temperatures=Temperatures(greedy_share=1.0))
    options: dict[str, Any] = {"batch_size": 16, "max_length": 40, "top_k": 4, "progress": False}
    generate_corpus(target, scripts, tmp_path / "c", 570, stop_ids=[], **options)
    corpus = Corpus(tmp_path / "c")
    # Of the five that come first the last one is held out.
    learned = torch.stack([corpus.tokens[corpus.document == i] for i in range(4)])
    inputs = learned[:, :6]
    common: dict[str, Any] = {
        "attention_mask": torch.ones_like(inputs), "max_new_tokens": 24, "do_sample": False,
    }  # fmt: skip
    assert torch.equal(target.generate(inputs, **common), learned[:, :30])
    model = mimo_from_llama(target)

    def rate() -> float:
        model.eval()
        assistant = {"assistant_model": MiMoMTP(model), "num_assistant_tokens": 1}
        output = model.generate(inputs, **common, **assistant, return_dict_in_generate=True)
        assert torch.equal(output.sequences, learned[:, :30])
        return output.speculation.per_position[0]

    assert rate() < 0.2
    settings = replace(
        SETTINGS,
        objective="cross_entropy",
        evaluate_every=120,
        self_generated=StageSettings(steps=120, batch_size=4),
    )
    make_trainer(tmp_path / "out", corpus, settings, model, num_draft_tokens=1).train()
    assert rate() > 0.7


def test_reduced_vocabulary_leaves_the_others_out(markov_corpus, tmp_path):
    ids = [0, 2, 4, 5, 9, 11]
    corpus = markov_corpus()
    model = mimo(mtp_draft_token_ids=ids)
    result = make_trainer(tmp_path, corpus, model=model, num_draft_tokens=1).train()
    index, _ = comparable_positions(corpus, corpus.is_held_out(5), 1)
    expressible = torch.isin(corpus.tokens[index + 2], torch.tensor(ids)).float().mean()
    assert 0.8 * expressible < result.best.per_position[0] <= expressible


def test_held_out_documents(markov_corpus):
    corpus = markov_corpus(num_documents=20)  # 10 greedy ones, of 24 tokens
    everything = torch.ones(20, dtype=torch.bool)
    network = MiMoMTP(mimo().eval())
    # The first two tokens are not flagged, and two drafts need two tokens more.
    assert (
        HeldOutDocuments(corpus, everything, 2, 10_000).measure(network, False).num_positions == 210
    )
    few = HeldOutDocuments(corpus, everything, 2, 22)
    assert few.measure(network, False).num_positions == 2 * 21
    whole = few.measure(network, False)
    assert few.measure(network, False, tokens_per_batch=24) == whole
    corpus.flag[:] = False
    with pytest.raises(ValueError, match="20 held-out documents have no position"):
        HeldOutDocuments(corpus, everything, 2, 10)


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "options", "match"),
        [
            ({"mtp_feed": "pre_norm"}, {}, "mtp_feed='pre_norm', but a corpus holds"),
            ({"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers=2, but the first"),
            ({"num_nextn_predict_layers": 0}, {}, "num_nextn_predict_layers=0"),
            ({"hidden_size": 16}, {}, "hidden_size=24 and vocab_size=12, the model 16 and 12"),
            ({"vocab_size": 13}, {}, "vocab_size=12, the model 24 and 13"),
            ({}, {"num_draft_tokens": 0}, "num_draft_tokens=0 must be at least 1"),
            ({}, {"window_length": 1}, "window_length=1 must be at least 2"),
        ],
    )
    def test_what_does_not_fit(self, markov_corpus, tmp_path, model, options, match):
        with pytest.raises(ValueError, match=match):
            make_trainer(tmp_path, markov_corpus(), model=mimo(**model), **options)

    def test_the_rest(self, markov_corpus, tmp_path):
        corpus = markov_corpus()
        with pytest.raises(ValueError, match="give a corpus"):
            make_trainer(tmp_path, None)
        with pytest.raises(ValueError, match=r"model must be float32, got torch\.bfloat16"):
            make_trainer(tmp_path, corpus, model=mimo().bfloat16())
        with pytest.raises(ValueError, match="distill_top_k=3, but self_generated keeps top_k=2"):
            make_trainer(tmp_path, corpus, replace(SETTINGS, distill_top_k=3))
        with pytest.raises(TypeError, match="MiMoMTP needs a MiMoForCausalLM"):
            make_trainer(tmp_path, corpus, model=torch.nn.Linear(1, 1))
        corpus.flag[:] = False
        with pytest.raises(ValueError, match="self_generated has no flagged token"):
            make_trainer(tmp_path, corpus)
