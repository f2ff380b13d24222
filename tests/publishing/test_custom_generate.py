"""The published loop, without hf_specdec: the tokens of plain ``generate``, or a clear refusal."""

import builtins
import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tiny_models import EOS, FAMILIES, row_by_row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)
from transformers.generation import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.publishing import custom_generate
from hf_specdec.publishing.folder import PublishOptions, publish_folder

NEW = 24


@pytest.fixture
def published(make_speculator, tmp_path: Path) -> Path:
    """A published folder of a random speculator for the tiny targets."""
    return publish(make_speculator(), tmp_path / "my-drafter")


def publish(speculator: Any, folder: Path) -> Path:
    speculator.save_pretrained(folder)
    publish_folder(folder, PublishOptions(base_model="owner/tiny", tokenizer=False))
    return folder


@pytest.fixture(autouse=True)
def _hidden(request, monkeypatch):
    """As if hf_specdec were not installed: not found, and transformers as it is."""
    if "installed" in request.fixturenames:
        return
    find_spec = importlib.util.find_spec

    def find(name: str, *args):
        return None if name == "hf_specdec" else find_spec(name, *args)

    monkeypatch.setattr(custom_generate.importlib.util, "find_spec", find)
    hf_specdec.disable()


@pytest.fixture
def installed() -> None:
    """Leave hf_specdec visible."""


def generate(target, published: Path, inputs, **kwargs):
    return target.generate(
        **inputs, custom_generate=str(published), trust_remote_code=True, **kwargs
    )


def one(prompts, row: int = 0) -> dict[str, torch.Tensor]:
    inputs = prompts(3)
    ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "hot": {"do_sample": True, "temperature": 2.0, "top_k": 0},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "fewer drafts": {"do_sample": False, "num_assistant_tokens": 1},
    "no drafts": {"do_sample": True, "num_assistant_tokens": 0},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_of_plain_generate(target, published, prompts, setting: str) -> None:
    settings = SETTINGS[setting]
    plain = {k: v for k, v in settings.items() if k != "num_assistant_tokens"}
    for row in range(3):
        inputs = one(prompts, row)
        torch.manual_seed(row)
        expected = target.generate(**inputs, max_new_tokens=NEW, **plain)
        torch.manual_seed(row)
        assert generate(target, published, inputs, max_new_tokens=NEW, **settings).equal(expected)
        # As many numbers were drawn as in plain generation.
        following = torch.rand(1)
        torch.manual_seed(row)
        target.generate(**inputs, max_new_tokens=NEW, **plain)
        assert torch.rand(1).equal(following)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(make_target, published, prompts, family: str) -> None:
    target = make_target(family)
    inputs = one(prompts)
    sequences = generate(target, published, inputs, max_new_tokens=NEW, do_sample=False)
    width = inputs["input_ids"].shape[1]
    expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
    assert [sequences[0, width:].tolist()] == expected


class Oracle:
    """Knows the text, is wrong about every third token, and checks the state it is shown."""

    def __init__(self, speculator, target, text: list[int], said: list[int]) -> None:
        self.config = speculator.config
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.text, self.said = text, said
        with torch.no_grad():
            output = target(input_ids=torch.tensor([text]), output_hidden_states=True)
        self.states = output.hidden_states[-1][0]

    def propose(self, state, token, num_draft_tokens: int) -> torch.Tensor:
        at = len(self.said)
        assert self.said == self.text[:at] and token.tolist() == self.said[-1:]
        # Of the token before the newest one, which was not run yet.
        torch.testing.assert_close(state[0], self.states[at - 2], rtol=1e-3, atol=1e-3)
        known = self.text[at : at + num_draft_tokens]
        draft = [3 if (at + i) % 3 == 0 else known[i] for i in range(len(known))]
        return torch.tensor([draft + [3] * (num_draft_tokens - len(draft))])


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.puts: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.puts.append(value.numel())

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def with_oracle(make_speculator, published):
    """``with_oracle(target, inputs, text, **settings)``: the loop with a good drafter."""

    def generate_(target, inputs, text: list[int], **settings):
        streamer = Recorder()
        oracle = Oracle(make_speculator(), target, text, streamer.tokens)
        sequences = generate(
            target, published, inputs, assistant_model=oracle, streamer=streamer, **settings
        )
        assert streamer.ended and streamer.tokens == sequences[0].tolist()
        return sequences, streamer.puts[1:]

    return generate_


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_accepted_drafts_save_forwards(
    make_target, with_oracle, prompts, count_forwards, family: str, do_sample: bool
) -> None:
    """With a drafter that is right twice of three times: the same text in fewer forwards."""
    target, inputs = make_target(family), one(prompts)
    settings = {"max_new_tokens": NEW, "do_sample": do_sample}
    torch.manual_seed(1)
    expected = target.generate(**inputs, **settings)
    torch.manual_seed(1)
    with count_forwards(target) as lengths:
        sequences, runs = with_oracle(target, inputs, expected[0].tolist(), **settings)
    assert sequences.equal(expected)
    # The oracle's own forward over the text comes first, then the prompt.
    assert max(runs) == 3 and len(lengths[2:]) < 0.6 * NEW and max(lengths[2:]) == 5


class StopsAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("how", ["eos", "length", "criterion"])
def test_ends_where_plain_generation_ends(target, with_oracle, prompts, how: str) -> None:
    """Inside of accepted drafts, too."""
    inputs = one(prompts)
    width = inputs["input_ids"].shape[1]
    greedy = {"max_new_tokens": NEW, "do_sample": False}
    text = target.generate(**inputs, **greedy)[0].tolist()
    ended = 0
    for at in range(1, 9):
        settings: dict[str, Any] = {
            "eos": {**greedy, "eos_token_id": text[width + at - 1]},
            "length": {**greedy, "max_new_tokens": at},
            "criterion": {
                **greedy, "stopping_criteria": StoppingCriteriaList([StopsAt(width + at)])
            },
        }[how]  # fmt: skip
        expected = target.generate(**inputs, **settings)
        sequences, runs = with_oracle(target, inputs, text, **settings)
        assert sequences.equal(expected)
        ended += sum(runs) == at
    assert ended >= 3


class Forbids(LogitsProcessor):
    """Has a state: forbids another token with every call."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, (self.calls * 7) % 64] = -torch.inf
        return scores


def test_processors_with_a_state(target, with_oracle, prompts) -> None:
    inputs = one(prompts)

    def settings() -> dict[str, Any]:
        processors = LogitsProcessorList([Forbids(), MinPLogitsWarper(0.01)])
        return {"max_new_tokens": NEW, "do_sample": False, "logits_processor": processors}

    expected = target.generate(**inputs, **settings())
    sequences, runs = with_oracle(target, inputs, expected[0].tolist(), **settings())
    assert sequences.equal(expected) and max(runs) > 1


def test_stop_strings(target, published, prompts) -> None:
    core = Tokenizer(models.WordLevel({chr(48 + i): i for i in range(64)}, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    inputs = one(prompts)
    width = inputs["input_ids"].shape[1]
    text = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, width:]
    settings = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer,
                "stop_strings": [tokenizer.decode(text[5])]}  # fmt: skip
    expected = target.generate(**inputs, **settings)
    assert expected.shape[1] < width + NEW
    assert generate(target, published, inputs, **settings).equal(expected)
    del settings["tokenizer"]
    with pytest.raises(ValueError, match="stop_strings needs the target's tokenizer"):
        generate(target, published, inputs, **settings)


def test_padded_row_and_dictionary(target, published, prompts) -> None:
    inputs = {name: tensor[1:2] for name, tensor in prompts(3).items()}
    assert inputs["attention_mask"][0, 0] == 0
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(**inputs, **settings).sequences
    assert generate(target, published, inputs, **settings).sequences.equal(expected)


def test_no_more_is_drafted_than_the_length_allows(target, published, prompts, monkeypatch) -> None:
    asked: list[int] = []
    # The published file is run by its text: it is changed there.
    file = published / "custom_generate" / "generate.py"
    text = file.read_text()
    assert text.count("draft = _propose(") == 1
    file.write_text(text.replace("draft = _propose(", "draft = ASKED(_propose, "))

    def watched(propose, *args):
        asked.append(args[-1])
        return propose(*args)

    monkeypatch.setattr(builtins, "ASKED", watched, raising=False)
    generate(target, published, one(prompts), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    # Behind the first of three tokens one draft fits, behind the second none.
    assert asked[0] == 1 and set(asked[1:]) <= {0}


def test_drafter_is_loaded_once(target, published, prompts, monkeypatch) -> None:
    loads = []
    load = custom_generate.AutoModel.from_pretrained

    def counting(*args: Any, **kwargs: Any) -> Any:
        loads.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", counting)
    for _ in range(2):
        generate(target, published, one(prompts), max_new_tokens=3)
    assert loads == [(str(published),)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "without hf_specdec this drafter serves one row without beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "2 rows.*pip install hf-specdec"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores: needs hf_spec"),
        ({"row_seeds": [1]}, "row_seeds: needs hf_specdec"),
        ({"use_cache": False}, "use_cache=False"),
        ({"num_assistant_tokens": "auto"}, "num_assistant_tokens='auto' needs hf_specdec"),
        ({"num_assistant_tokens": 5}, "num_assistant_tokens=5 must be 0 to 4"),
        ({"cache": DynamicCache()}, "cache: needs hf_specdec"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds: needs hf_specdec"),
    ],
)
def test_refusals(target, published, prompts, kwargs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target, published, one(prompts), max_new_tokens=3, **kwargs)


def test_batch_is_refused(target, published, prompts) -> None:
    with pytest.raises(ValueError, match="3 rows"):
        generate(target, published, prompts(3), max_new_tokens=3)


def test_drafter_of_another_target(target, make_speculator, published, prompts) -> None:
    with pytest.raises(ValueError, match="emb_dim=16.*hidden_size=32.*another target"):
        generate(target, published, one(prompts), assistant_model=make_speculator(emb_dim=16))


def test_repository_must_be_known(target, prompts) -> None:
    with pytest.raises(ValueError, match="the repository of the drafter is not known"):
        custom_generate.generate(target, **one(prompts))


def test_trust_must_be_given(target, published, prompts) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        target.generate(**one(prompts), custom_generate=str(published), trust_remote_code=False)


def test_offloaded_target(target, published, prompts) -> None:
    inputs = one(prompts)
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = target.generate(**inputs, **options)
    offloaded = cpu_offload(copy.deepcopy(target), torch.device("cpu"))
    assert generate(offloaded, published, inputs, **options).equal(expected)


def test_offloaded_tables_are_refused(target, make_speculator, prompts, tmp_path: Path) -> None:
    published = publish(make_speculator(share_target_weights=True, inner_dim=32), tmp_path / "x")
    offloaded = cpu_offload(copy.deepcopy(target), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"embedding and the head of LlamaFor.*is offloaded or"):
        generate(offloaded, published, one(prompts), max_new_tokens=3)


def test_offloaded_tables_where_hf_specdec_is_installed(
    installed, target, make_speculator, prompts, tmp_path: Path
) -> None:
    published = publish(make_speculator(share_target_weights=True, inner_dim=32), tmp_path / "x")
    offloaded = cpu_offload(copy.deepcopy(target), torch.device("cpu"))
    output = generate(
        offloaded, published, prompts(3), max_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    width = prompts(3)["input_ids"].shape[1]
    expected = row_by_row(target, prompts(3), max_new_tokens=NEW, do_sample=False)
    assert output.sequences[:, width:].tolist() == expected
    assert output.speculation.num_drafts > 0


def test_recurrent_target_is_refused(published, prompts) -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1,
        linear_num_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"],
        pad_token_id=0, eos_token_id=EOS, bos_token_id=1,
    )  # fmt: skip
    target = Qwen3NextForCausalLM(config).eval()
    inputs = one(prompts)
    with pytest.raises(ValueError, match="can't be rolled back.*pip install hf-specdec"):
        generate(target, published, inputs, max_new_tokens=NEW, do_sample=False)


def test_uses_hf_specdec_where_it_is_installed(installed, target, published, prompts) -> None:
    inputs = prompts(3)
    output = generate(
        target, published, inputs, max_new_tokens=NEW, do_sample=False, num_assistant_tokens=2,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert output.speculation.rows[2].num_drafts > 0
    width = inputs["input_ids"].shape[1]
    expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
    assert output.sequences[:, width:].tolist() == expected


def test_file_is_self_contained() -> None:
    """transformers imports every package that a published file names, even inside functions."""
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    source = custom_generate.__file__
    assert set(get_imports(source)) <= {"importlib", "inspect", "torch", "transformers", "typing",
                                        "weakref"}  # fmt: skip
    assert get_relative_imports(source) == []
