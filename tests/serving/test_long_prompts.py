"""Prompts are tokenized beside the event loop, and no request can ask for endless texts."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from serving_server import MODEL, Running, serving, wait_for

from hf_specdec.cli.serve import UNKNOWN_POSITIONS, _positions
from hf_specdec.serving.api_errors import ApiError
from hf_specdec.serving.served_model import ServedModel

CHAT: Any = [{"role": "user", "content": "a cat"}]


@pytest.fixture
def tokenizers_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the threads in which prompts were encoded."""
    names: list[str] = []
    for name in ("encode", "encode_chat"):
        method = getattr(ServedModel, name)

        def watch(self: Any, *args: Any, method: Any = method) -> Any:
            names.append(threading.current_thread().name)
            return method(self, *args)

        monkeypatch.setattr(ServedModel, name, watch)
    yield names


def test_no_prompt_is_tokenized_on_the_event_loop(
    running: Running, tokenizers_threads: list[str]
) -> None:
    client = running.client
    client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
    client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2)
    client.responses.create(model=MODEL, input="a cat", max_output_tokens=2)
    assert len(tokenizers_threads) == 4
    assert all(name.startswith("tokenizer") for name in tokenizers_threads)


def test_others_are_answered_while_a_long_prompt_is_tokenized(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    encode = ServedModel.encode

    def slow(self: Any, text: str) -> list[int]:
        begun.set()
        may_end.wait(30)
        return encode(self, text)

    monkeypatch.setattr(ServedModel, "encode", slow)

    def ask() -> str:
        answer = running.client.completions.create(
            model=MODEL, prompt="the dog", max_tokens=5, temperature=0
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(ask)
        try:
            assert begun.wait(20)
            assert running.client.with_options(timeout=10).models.list().data[0].id == MODEL
            assert not said.done()
        finally:
            may_end.set()
        assert said.result(20) == running.greedy("the dog", 5)


def test_the_tokenizers_thread_ends_with_the_server() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("tokenizer") for thread in threading.enumerate())

    before = threads()
    with serving() as server:
        server.client.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert threads() == before + 1
    wait_for(lambda: threads() == before)


@pytest.mark.parametrize("asked", [UNKNOWN_POSITIONS, 10**12])
def test_a_model_without_a_number_of_positions_has_a_limit(asked: int) -> None:
    # As of Bloom or Mamba, whose configs have no such field.
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    target = SimpleNamespace(config=config)
    positions = _positions(target, None)
    assert positions == 131_072
    assert _positions(target, 10**6) == 10**6
    served = ServedModel(target, None, MODEL, positions)
    assert served.max_new_tokens(UNKNOWN_POSITIONS - 3, 3, "max_tokens") == UNKNOWN_POSITIONS - 3
    with pytest.raises(ApiError, match=f"max_tokens={asked}: the prompt has 3 tokens"):
        served.max_new_tokens(asked, 3, "max_tokens")


def test_ids_of_a_packed_embedding_are_those_it_stands_for() -> None:
    packed = SimpleNamespace(weight=torch.zeros(8, 3, dtype=torch.uint8), num_embeddings=64)
    target = SimpleNamespace(get_input_embeddings=lambda: packed)
    served = ServedModel(target, None, MODEL, 16)
    assert served.vocab_size == 64
    served.check_prompt([63], "prompt")
    with pytest.raises(ApiError, match="64"):
        served.check_prompt([64], "prompt")


def test_a_shorter_limit_may_be_set() -> None:
    with (
        serving(max_model_len=16) as server,
        pytest.raises(openai.BadRequestError, match="max_tokens=16: the prompt has 3 tokens"),
    ):
        server.client.completions.create(model=MODEL, prompt="abc", max_tokens=16)
