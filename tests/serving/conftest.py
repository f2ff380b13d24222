"""A real server in a thread, and OpenAI's own client."""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
import torch
from tiny_models import EOS, _target
from tiny_pairs import TEMPLATE, make_tokenizer

import hf_specdec
from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.cli.options import PairSettings
from hf_specdec.cli.serve import ServeSettings, make_server

MODEL = "tiny-llama"
SETTINGS = ServeSettings(
    pair=PairSettings("unused"),
    host="127.0.0.1",
    port=0,
    served_model_name=MODEL,
    max_model_len=None,
    default_max_tokens=32,
    max_batch_size=8,
    batch_wait=0.02,
    max_waiting=64,
    shutdown_timeout=30.0,
    metrics_prefix="hf_specdec",
    enable_cors=False,
    log_level="warning",
)


@dataclass(frozen=True)
class Running:
    """A server, the client for it, and the target that says what it must answer."""

    server: Any
    client: openai.OpenAI
    url: str
    target: Any
    plain: Any
    tokenizer: Any
    thread: threading.Thread

    @property
    def engine(self) -> Any:
        return self.server._application.engine

    @property
    def gate(self) -> Any:
        return self.server._application.gate

    def greedy(self, prompt: str, max_new_tokens: int = 32) -> str:
        """What plain `generate` says to a prompt."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        out = self.plain.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        return self.tokenizer.decode(
            out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )

    def chat_prompt(self, *messages: str) -> str:
        chat = [{"role": "user", "content": message} for message in messages]
        return self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def make_pair() -> tuple[Any, Any]:
    """A target with a drafter that is right now and then, and the same target alone."""
    target = copy.deepcopy(_target("llama"))
    target.generation_config.eos_token_id = EOS
    plain = copy.deepcopy(target)
    config = MLPSpeculatorConfig(
        vocab_size=target.config.vocab_size,
        emb_dim=target.config.hidden_size,
        inner_dim=24,
        n_predict=3,
        top_k_tokens_per_head=[2] * 3,
        n_candidates=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        drafter = MLPSpeculatorPreTrainedModel(config).eval()
    return hf_specdec.attach(target, {"model": drafter}), plain


@contextlib.contextmanager
def serving(**changes: Any) -> Iterator[Running]:
    target, plain = make_pair()
    tokenizer = make_tokenizer(TEMPLATE)
    server = make_server(target, tokenizer, replace(SETTINGS, **changes))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    try:
        yield Running(server, client, server.address, target, plain, tokenizer, thread)
    finally:
        client.close()
        server.drain()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server for the tests of one file."""
    with serving() as server:
        yield server


@pytest.fixture
def slow(running: Running) -> Iterator[None]:
    """Forwards of the target that take a while."""
    handle = running.target.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    yield
    handle.remove()
