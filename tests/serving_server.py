"""A real server in a thread, and OpenAI's own client."""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import EOS, _target
from tiny_pairs import TEMPLATE, make_tokenizer, random_speculator

import hf_specdec
from hf_specdec import Drafter
from hf_specdec.cli.options import PairSettings
from hf_specdec.cli.serve import ServeSettings, make_server

if TYPE_CHECKING:
    import openai

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
    concurrent_batches=1,
    chat_template_kwargs={"terse": "no"},
    shutdown_timeout=30.0,
    metrics_prefix="hf_specdec",
    enable_cors=False,
    log_level="warning",
)


@dataclass(frozen=True)
class Running:
    """A server, the client for it, and the models that say what it must answer.

    Attributes:
        target: the server's.
        plain: the same without a drafter.
        direct: the same with a drafter, for calls of `generate` beside the server's.
    """

    server: Any
    client: "openai.OpenAI"
    url: str
    target: Any
    plain: Any
    direct: Any
    tokenizer: Any
    thread: threading.Thread

    @property
    def engine(self) -> Any:
        return self.server._application.engine

    @property
    def gate(self) -> Any:
        return self.server._application.gate

    def greedy_ids(self, prompt: str, max_new_tokens: int = 32) -> list[int]:
        """What plain `generate` says to a prompt, the end token included."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        out = self.plain.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    def greedy(self, prompt: str, max_new_tokens: int = 32) -> str:
        """The same as text."""
        ids = self.greedy_ids(prompt, max_new_tokens)
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def chat_prompt(self, *messages: str) -> str:
        chat = [{"role": "user", "content": message} for message in messages]
        return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


class KnowingDrafter(Drafter):
    """Proposes what the target would say greedily, and every third time something else."""

    def __init__(self, plain: Any):
        self._plain = plain

    @property
    def max_draft_tokens(self) -> int:
        return 3

    def check(self, target: Any) -> None:
        pass

    def start(self, target: Any, prompt: Any = None, num_draft_tokens: Any = None) -> None:
        rows = zip(prompt.input_ids.tolist(), prompt.padding.tolist(), strict=True)
        self._texts = [ids[padding:] for ids, padding in rows]

    def observe(self, step: Any) -> None:
        for text, ids, n in zip(
            self._texts, step.input_ids.tolist(), step.host_num_accepted, strict=True
        ):
            text += ids[1 : n + 1]

    @torch.no_grad()
    def propose(self, token_ids: Any, num_draft_tokens: int, pick: Any = None) -> torch.Tensor:
        drafts = []
        for text, token in zip(self._texts, token_ids.tolist(), strict=True):
            text.append(token)
            ids = list(text)
            for _ in range(num_draft_tokens):
                best = int(self._plain(torch.tensor([ids])).logits[0, -1].argmax())
                ids.append(best if len(ids) % 3 else 3 + best % 50)
            drafts.append(ids[len(text) :])
        return torch.tensor(drafts)

    def keep_rows(self, order: Any) -> None:
        self._texts = [self._texts[i] for i in order]


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def make_pair(knowing: bool = True) -> tuple[Any, Any]:
    """A target with a drafter, and the same target alone.

    Args:
        knowing: the drafter is mostly right, but is one object that serves one call at a time;
            otherwise it is a network with random weights.
    """
    target = copy.deepcopy(_target("llama"))
    target.generation_config.eos_token_id = EOS
    plain = copy.deepcopy(target)
    drafter: Any = KnowingDrafter(plain) if knowing else random_speculator(target)
    return hf_specdec.attach(target, {"model": drafter}), plain


@contextlib.contextmanager
def serving(knowing: bool = True, **changes: Any) -> Iterator[Running]:
    import openai  # here, as this file is imported by every test run

    target, plain = make_pair(knowing)
    tokenizer = make_tokenizer(TEMPLATE)
    server = make_server(target, tokenizer, replace(SETTINGS, **changes))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    try:
        yield Running(
            server, client, server.address, target, plain, make_pair()[0], tokenizer, thread
        )
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


class Hold:
    """Forwards of a target that wait, so that a test decides what happens before they go on.

    Args:
        target: the model.
        after: forwards that pass before.
        seconds: the longest wait; a test that gets there fails for another reason.
    """

    def __init__(self, target: Any, after: int = 0, seconds: float = 20.0):
        self._open = threading.Event()
        self._left = after
        self._seconds = seconds
        self._thread: threading.Thread | None = None
        self._handle = target.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        # Of the first thread that comes here; another batch may run beside it.
        self._thread = self._thread or threading.current_thread()
        if self._thread is not threading.current_thread():
            return
        self._left -= 1
        if self._left < 0:
            self._open.wait(self._seconds)

    def release(self) -> None:
        self._open.set()
        self._handle.remove()


@contextlib.contextmanager
def holding(target: Any, after: int = 0) -> Iterator[Hold]:
    hold = Hold(target, after)
    try:
        yield hold
    finally:
        hold.release()
