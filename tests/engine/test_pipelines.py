"""Pipelines with assistants of every kind, and of attached targets, say what the plain one says."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_checkpoints
import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_multimodal, multimodal_prompts
from tiny_pairs import TEMPLATE, make_tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BatchFeature,
    TextIteratorStreamer,
    pipeline,
)

import hf_specdec
from hf_specdec import SpeculationStats
from hf_specdec.metrics import StatsRecorder

PROMPTS = ["a cat", "b", "the dog, or so", "xyz"]
GREEDY = {"max_new_tokens": 14, "do_sample": False}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[SpeculationStats]:
    """The statistics of every call that our loop serves."""
    seen: list[SpeculationStats] = []
    finish = StatsRecorder.finish

    def record(self: StatsRecorder, num_new_tokens: Any) -> SpeculationStats:
        seen.append(finish(self, num_new_tokens))
        return seen[-1]

    monkeypatch.setattr(StatsRecorder, "finish", record)
    return seen


@pytest.fixture
def make_pipe(pair_folders: tuple[Path, Path]) -> Callable[..., Any]:
    """``make_pipe(**arguments)``: a text-generation pipeline of the tiny target."""

    def make(model: Any = None, **arguments: Any) -> Any:
        pipe = pipeline(
            "text-generation",
            model=model or str(pair_folders[0]),
            dtype=torch.float32,
            device="cpu",
            **arguments,
        )
        return pipe

    return make


def texts_of(output: Any) -> list[str]:
    return [entry[0]["generated_text"] for entry in output]


@pytest.mark.parametrize("how", ["folder", "path", "speculator", "drafter"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_text_is_the_plain_pipelines(
    make_pipe: Any, pair_folders: Any, calls: list[SpeculationStats], how: str, batch_size: int
) -> None:
    plain = make_pipe()
    expected = [plain(prompt, **GREEDY)[0]["generated_text"] for prompt in PROMPTS]
    assert calls == []
    assistant: Any = str(pair_folders[1])
    if how == "path":
        assistant = pair_folders[1]
    elif how != "folder":
        assistant = AutoModel.from_pretrained(assistant)
    if how == "drafter":
        assistant = hf_specdec.integration.drafter_for(assistant)  # type: ignore[attr-defined]
    pipe = make_pipe(assistant_model=assistant)
    assert pipe.assistant_tokenizer is None
    assert texts_of(pipe(PROMPTS, batch_size=batch_size, **GREEDY)) == expected
    assert [len(stats.rows) for stats in calls] == [batch_size] * (4 // batch_size)
    assert all(stats.num_drafts > 0 for stats in calls)
    if how == "folder":
        assert pipe.assistant_model.dtype == pipe.model.dtype


def test_an_id_is_resolved_as_a_folder_is(
    make_pipe: Any, pair_folders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a network: a folder that is named relative to here, as an id would be."""
    shutil.copytree(pair_folders[1], tmp_path / "org" / "drafter")
    monkeypatch.chdir(tmp_path)
    pipe = make_pipe(assistant_model="org/drafter")
    assert type(pipe.assistant_model) is hf_specdec.MLPSpeculatorPreTrainedModel


def test_generation_arguments_reach_the_loop(
    make_pipe: Any, pair_folders: Any, calls: list[SpeculationStats]
) -> None:
    pipe = make_pipe(assistant_model=str(pair_folders[1]))
    pipe("a cat", num_assistant_tokens=1, **GREEDY)
    assert len(calls[0].accepted_per_position) == 1
    torch.manual_seed(3)
    first = pipe("a cat", max_new_tokens=14, do_sample=True, row_seeds=[7])
    second = pipe("a cat", max_new_tokens=14, do_sample=True, row_seeds=[7], num_assistant_tokens=2)
    assert first == second


def test_chats(make_pipe: Any, pair_folders: Any, calls: list[SpeculationStats]) -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    chats = [CHAT, [*CHAT, {"role": "assistant", "content": "yo"}, *CHAT]]
    plain = make_pipe(tokenizer=tokenizer)
    expected = [plain(chat, **GREEDY)[0]["generated_text"] for chat in chats]
    assert calls == []
    pipe = make_pipe(tokenizer=tokenizer, assistant_model=str(pair_folders[1]))
    assert texts_of(pipe(chats, batch_size=2, **GREEDY)) == expected
    assert expected[0][-1]["role"] == "assistant"
    assert len(calls[0].rows) == 2


def test_streaming(make_pipe: Any, pair_folders: Any, calls: list[SpeculationStats]) -> None:
    (expected,) = make_pipe()("a cat", return_full_text=False, **GREEDY)
    pipe = make_pipe(assistant_model=str(pair_folders[1]))
    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    pipe("a cat", streamer=streamer, **GREEDY)
    assert "".join(streamer) == expected["generated_text"]
    assert len(calls) == 1


def test_an_assistant_that_does_not_fit_is_refused_when_the_pipeline_is_made(
    make_pipe: Any, make_speculator: Any, tmp_path: Path
) -> None:
    speculator = make_speculator(emb_dim=48)
    with pytest.raises(ValueError, match="reads hidden states of width emb_dim=48"):
        make_pipe(assistant_model=speculator)
    speculator.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="reads hidden states of width emb_dim=48"):
        make_pipe(assistant_model=str(tmp_path))


def test_other_assistants_stay_transformers_own(
    make_pipe: Any, pair_folders: Any, calls: list[SpeculationStats]
) -> None:
    target = str(pair_folders[0])
    expected = make_pipe()("a cat", **GREEDY)
    for assistant in (target, AutoModelForCausalLM.from_pretrained(target)):
        assert make_pipe(assistant_model=assistant)("a cat", **GREEDY) == expected
    assert calls == []
    with pytest.raises(OSError, match="couldn't connect|nowhere/at-all"):
        make_pipe(assistant_model="nowhere/at-all")


def test_closed_seams_are_transformers_own_again(make_pipe: Any, make_speculator: Any) -> None:
    hf_specdec.disable()
    with pytest.raises(ValueError, match="different tokenizer than the main model"):
        make_pipe(assistant_model=make_speculator())


def test_attached_targets(make_pipe: Any, pair_folders: Any, calls: list[SpeculationStats]) -> None:
    plain = make_pipe()
    expected = [plain(prompt, **GREEDY)[0]["generated_text"] for prompt in PROMPTS]
    hf_specdec.attach(plain.model, {"model": str(pair_folders[1])})
    assert texts_of(plain(PROMPTS, batch_size=2, **GREEDY)) == expected
    assert len(calls) == 2
    assert hf_specdec.speculation_totals(plain.model).snapshot().num_new_tokens == 4 * 14


def test_attached_mtp_layers(make_pipe: Any, calls: list[SpeculationStats]) -> None:
    pipe = make_pipe(mtp_checkpoints.load("glm4_moe"), tokenizer=make_tokenizer())
    expected = [pipe(prompt, **GREEDY)[0]["generated_text"] for prompt in PROMPTS]
    hf_specdec.attach(pipe.model, {"method": "mtp"})
    assert texts_of(pipe(PROMPTS, batch_size=4, **GREEDY)) == expected
    assert [len(stats.rows) for stats in calls] == [4]


class TinyProcessor:
    """In place of Gemma 4's, which needs torchvision: an image and a sound in the prompt."""

    chat_template = None

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()

    def __call__(self, text: Any, **_: Any) -> BatchFeature:
        rows = 1 if isinstance(text, str) else len(text)
        return BatchFeature({k: v[:rows] for k, v in multimodal_prompts("E2B").items()})


@pytest.mark.parametrize("task", ["image-text-to-text", "any-to-any"])
@pytest.mark.parametrize("how", ["assistant_model", "attach"])
def test_multimodal_pipelines(
    task: Any, how: str, calls: list[SpeculationStats], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    # Torchvision is asked for by the processors that TinyProcessor stands in for.
    monkeypatch.setattr("transformers.pipelines.any_to_any.requires_backends", lambda *_: None)
    target = copy.deepcopy(gemma4_multimodal("E2B"))
    assistant = gemma4_assistant(target)
    picture = image.new("RGB", (8, 8))

    def ids_of(**arguments: Any) -> list[int]:
        make: Any = pipeline
        pipe = make(task, model=target, processor=TinyProcessor(), device="cpu", **arguments)
        (output,) = pipe(images=picture, text="a", return_tensors=True, **GREEDY)
        return output["generated_token_ids"].tolist()

    expected = ids_of()
    assert calls == []
    if how == "attach":
        hf_specdec.attach(target, {"model": assistant})
    assert ids_of(**({"assistant_model": assistant} if how != "attach" else {})) == expected
    assert len(calls) == 1
    assert calls[0].num_drafts > 0
