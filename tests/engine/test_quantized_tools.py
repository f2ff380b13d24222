"""Quantized targets in the commands, in training, and where something of theirs can't be used."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_calls import Graphs
from quantized_models import HIDDEN, make_prompts, quantized
from tiny_models import VOCAB_SIZE, new_tokens, row_by_row
from tiny_pairs import make_tokenizer
from transformers import pipeline
from transformers.models.auto import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import hf_specdec
from hf_specdec.benchmarking.environment import describe_environment
from hf_specdec.cli.app import app
from hf_specdec.modeling.mimo import MiMoForCausalLM, mimo_from_decoder
from hf_specdec.targets.packing import PackedLinear
from hf_specdec.training import Corpus, extract_ground_truth, new_speculator
from hf_specdec.training.corpus_metadata import fingerprint
from hf_specdec.training.drafter_kinds import _as_mimo

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
# One of each library whose head is quantized as well.
HEADS = ["bnb-fp4-head", "torchao-int8-head", "quanto-int8-head"]
# transformers can't write what quanto has quantized.
STORED = ["bnb-fp4-head", "torchao-int8-head"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Quantized checkpoints with a tokenizer, and a drafter."""
    found = {"drafter": tmp_path_factory.mktemp("drafter")}
    config = hf_specdec.MLPSpeculatorConfig(
        vocab_size=VOCAB_SIZE, emb_dim=HIDDEN, inner_dim=24, n_predict=2,
        top_k_tokens_per_head=[2, 2], n_candidates=2,
    )  # fmt: skip
    torch.manual_seed(3)
    hf_specdec.MLPSpeculatorPreTrainedModel(config).save_pretrained(found["drafter"])
    for name in STORED:
        found[name] = tmp_path_factory.mktemp(name)
        quantized(name).save_pretrained(found[name])
        make_tokenizer().save_pretrained(found[name])
    return found


def run(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("name", STORED)
class TestCommands:
    def test_generate(self, name, folders, tmp_path):
        texts = ["a cat", "the dog, or so"]
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        run(
            "generate", folders[name], "--spec-model", folders["drafter"], "--input", source,
            "--output", target, "--device", "cpu", "--max-new-tokens", NEW, "--batch-size", 2,
        )  # fmt: skip
        rows = [json.loads(line) for line in target.read_text().splitlines()]
        model = AutoModelForCausalLM.from_pretrained(folders[name])
        assert model.is_quantized
        tokenizer, expected = make_tokenizer(), []
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt")
            ids: Any = model.generate(**inputs, **GREEDY)
            new = ids[0, inputs["input_ids"].shape[1] :]
            expected.append(tokenizer.decode(new, skip_special_tokens=True))
        assert [row["text"] for row in rows] == expected

    def test_bench_and_doctor(self, name, folders, tmp_path):
        numbers = tmp_path / "bench.json"
        run(
            "bench", folders[name], "--spec-model", folders["drafter"], "--k", 2, "--batch", 1,
            "--set", "code", "--limit", 1, "--repeats", 1, "--max-new-tokens", 6,
            "--device", "cpu", "--json", numbers,
        )  # fmt: skip
        report = json.loads(numbers.read_text())
        method = {"bnb-fp4-head": "bitsandbytes", "torchao-int8-head": "torchao"}[name]
        assert report["environment"]["quantization"] == method
        output = run(
            "doctor", folders[name], folders["drafter"], "--device", "cpu", "--max-new-tokens", 8
        ).output
        assert "state behind the final norm" in output

    def test_inspect(self, name, folders):
        found = json.loads(
            run("inspect", folders["drafter"], "--target", folders[name], "--json").stdout
        )
        assert found["fits"] is True
        stored = json.loads(run("inspect", folders[name], "--json").stdout)["stored_dtypes"]
        assert any("I8" in dtype or "U8" in dtype for dtype in stored)


def test_a_plain_target_names_no_quantization(target):
    assert "quantization" not in describe_environment(target, "resident")


def test_a_pipeline(folders):
    name = "torchao-int8-head"
    prompt = make_tokenizer().decode(make_prompts(1)["input_ids"][0])
    assistant = hf_specdec.MLPSpeculatorPreTrainedModel.from_pretrained(folders["drafter"])
    texts = [
        pipeline("text-generation", model=quantized(name), tokenizer=make_tokenizer(), **kwargs)(
            prompt, max_new_tokens=NEW, do_sample=False
        )
        for kwargs in ({}, {"assistant_model": assistant})
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", HEADS)
class TestTraining:
    def test_recorded_states_are_those_of_a_forward(self, name, tmp_path):
        target = quantized(name)
        generator = torch.Generator().manual_seed(4)
        text = torch.randint(3, VOCAB_SIZE, (12,), generator=generator).tolist()
        extract_ground_truth(target, [text], tmp_path, top_k=4, progress=False)
        corpus = Corpus(tmp_path)
        with torch.no_grad():
            expected = target.model(torch.tensor([text])).last_hidden_state[0]
        states = corpus.hidden[torch.arange(len(corpus))]
        assert states.dtype == torch.bfloat16
        assert torch.equal(states, expected[: len(states)].bfloat16())

    def test_the_fingerprint_reads_what_is_stored(self, name):
        target: Any = quantized(name)
        before = fingerprint(target)
        assert before == fingerprint(target) != fingerprint(quantized("quanto-int4"))

    def test_tables_do_not_begin_with_a_quantized_heads(self, name):
        settings: dict[str, Any] = {"inner_dim": 16, "n_predict": 2}
        with pytest.raises(ValueError, match=r"lm_head_weight is quantized .*initialize='random'"):
            new_speculator(quantized(name), **settings)
        model = new_speculator(quantized(name), initialize="random", **settings)
        assert model.dtype == torch.float32

    def test_no_mimo_is_made_of_it(self, name):
        with pytest.raises(ValueError, match="a quantized weight; load the target dequantized"):
            mimo_from_decoder(quantized(name))


def test_no_layer_is_trained_of_a_quantized_mimo(target):
    mimo: Any = mimo_from_decoder(target)
    assert _as_mimo(mimo) is mimo
    weight = mimo.model.layers[0].mlp.up_proj.weight
    mimo.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        weight.detach().to(torch.int8), requires_grad=False
    )
    assert isinstance(mimo, MiMoForCausalLM)
    with pytest.raises(ValueError, match=r"up_proj\.weight is quantized .*torch\.int8"):
        _as_mimo(mimo)


@pytest.mark.parametrize("name", HEADS)
class TestWhatReadsWeights:
    def test_a_speculator_that_shares_the_tables(self, name, make_speculator):
        speculator = make_speculator(emb_dim=HIDDEN, share_target_weights=True)
        with pytest.raises(ValueError, match="lm_head_weight is quantized, .*keep both out"):
            quantized(name).generate(**make_prompts(1), **GREEDY, assistant_model=speculator)

    def test_packing_finds_nothing(self, name):
        with pytest.raises(ValueError, match=r"no nn\.Linear to pack \(quantized layers stay"):
            hf_specdec.pack_weights(quantized(name))


def test_compiled_steps_of_static_shapes(make_speculator):
    """torchao's layers can be compiled; transformers says that bitsandbytes' and quanto's can't."""
    target, inputs, graphs = quantized("torchao-int8-head"), make_prompts(3), Graphs()
    expected = row_by_row(target, inputs, **GREEDY)
    speculator = make_speculator(emb_dim=HIDDEN, n_predict=2)
    arguments = {**GREEDY, **graphs.arguments}
    output = target.generate(**inputs, **arguments, assistant_model=speculator)
    assert new_tokens(output, inputs, [NEW] * 3) == expected
    assert len(graphs) > 0


def test_packing_takes_the_layers_that_are_left():
    target = quantized("torchao-int4")
    inputs = make_prompts(2)
    expected = row_by_row(target, inputs, **GREEDY)
    hf_specdec.pack_weights(target)
    try:
        packed = [n for n, layer in target.named_modules() if type(layer) is PackedLinear]
        output = target.generate(**inputs, **GREEDY)
    finally:
        hf_specdec.unpack_weights(target)
    assert packed == ["lm_head"]
    assert new_tokens(output, inputs, [NEW] * 2) == expected


def test_tables_left_out_of_the_quantization_are_shared(make_speculator):
    target, inputs = quantized("bnb-nf4"), make_prompts(3)
    speculator = make_speculator(emb_dim=HIDDEN, share_target_weights=True)
    output = target.generate(**inputs, **GREEDY, assistant_model=speculator)
    assert new_tokens(output, inputs, [NEW] * 3) == row_by_row(target, inputs, **GREEDY)
    head: Any = target.get_output_embeddings()
    tables: Any = speculator.speculator.target_tables
    assert tables.head.data_ptr() == head.weight.data_ptr()
