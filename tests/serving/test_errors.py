"""Requests that can't be served are answered so, in OpenAI's format, and the server goes on."""

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from serving_server import MODEL, Running, holding, serving, wait_for

from hf_specdec.serving.row_text import RowText

USER = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER], "temperature": 0}


def post(running: Running, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    """The status and the JSON of an answer; ``body`` is sent as it is if it is text."""
    address = urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request(method, path, text, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    data = json.loads(answer.read())
    connection.close()
    return answer.status, data


def is_alive(running: Running) -> bool:
    answer = running.client.chat.completions.create(**CHAT)
    return answer.choices[0].message.content == running.greedy(running.chat_prompt("hello"))


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"messages": []}, 400, "messages", "at least 1 item.*not \\[\\]"),
        ({"messages": None}, 400, "messages", "valid list"),
        ({"messages": [{"content": "x"}]}, 400, "messages.0.role", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "valid"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            400,
            "messages.0.content",
            "text",
        ),
        ({"model": "gpt-4"}, 404, "model", "'gpt-4' is not served here; 'tiny-llama' is"),
        ({"temperature": "hot"}, 400, "temperature", "valid number, not 'hot'"),
        ({"temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, 400, "max_tokens", "valid integer"),
        ({"max_tokens": 1000}, 400, "max_tokens", "behind it this model has 246 of its 256"),
        ({"n": 129}, 400, "n", "less than or equal to 128"),
        ({"n": 100}, 400, "n", "asks for 100 texts.*at most 64"),
        ({"seed": 2**63}, 400, "seed", "less than"),
        ({"stop": [""]}, 400, "stop.0", "at least 1 character"),
        ({"stream": "yes"}, 400, "stream", "valid boolean"),
        ({"logit_bias": {"64": 1}}, 400, "logit_bias", "'64' must be a token id from 0 to 63"),
        ({"logprobs": True}, 400, "logprobs", "not returned"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not constrained"),
        ({"best_of": 2}, 400, "best_of", "Unknown argument: best_of"),
        ({"chat_template_kwargs": {"tokenize": False}}, 400, "chat_template_kwargs", "tokenize"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template", "chat_template"),
        ({"chat_template_kwargs": {"truncation": True}}, 400, "chat_template_kwargs", "truncation"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", "305 tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_chat_request_that_cant_be_served(running, fields, status, param, message):
    got, data = post(running, "/v1/chat/completions", {**CHAT, **fields})
    assert got == status
    error = data["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"] or "").startswith(param or "")
    assert re.search(message, error["message"]), error


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([[]], "prompt is empty"),
        ([5, 64], "token ids must be less than 64"),
        ([5, -1], "greater than or equal to 0"),
        (5, "prompt"),
        ("x" * 256, "256 tokens.*256 positions"),
    ],
)
def test_a_prompt_that_cant_be_served(running, prompt, message):
    with pytest.raises(openai.BadRequestError, match=message):
        running.client.completions.create(model=MODEL, prompt=prompt)


@pytest.mark.parametrize("body", ["{", "not json", '{"model": "x",}', "[]", '"text"', "5", ""])
def test_a_body_that_is_no_json_object(running, body):
    for path in ("chat/completions", "completions", "responses"):
        status, data = post(running, f"/v1/{path}", body)
        assert status == 400
        assert data["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("completions", "prompt", '{"prompt": "a\\ud800"}'),
        ("completions", "stop", '{"prompt": "x", "stop": "\\ud800"}'),
        ("completions", "repetition_penalty", '{"prompt": "x", "repetition_penalty": Infinity}'),
        ("completions", "logit_bias", f'{{"prompt": "x", "logit_bias": {{"{"9" * 5000}": 1}}}}'),
        ("chat/completions", "messages", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("responses", "metadata", '{"input": "x", "metadata": {"a": NaN}}'),
        ("responses", "instructions", '{"input": "x", "instructions": "\\ud800"}'),
    ],
    ids=lambda value: value[:20],
)
def test_what_no_tokenizer_takes_and_no_answer_may_contain(running, path, param, body):
    status, data = post(running, f"/v1/{path}", body)
    assert status == 400
    assert data["error"]["param"] == param and len(data["error"]["message"]) < 300


def test_addresses_that_arent_there(running):
    assert post(running, "/v1/embeddings", {})[0] == 404
    assert post(running, "/v1/chat/completions", "", "GET")[0] == 405
    # transformers' server has these; here there is one model, and nothing unloads it.
    for path in ("/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions"):
        status, data = post(running, path, {"model": "x"})
        assert status == 404 and "error" in data
    with pytest.raises(openai.NotFoundError, match="not served here"):
        running.client.models.retrieve("other")
    assert [model.id for model in running.client.models.list()] == [MODEL]


def test_the_server_is_alive_after_all_that(running):
    assert is_alive(running)


def test_an_unserved_model_is_openais_not_found(running):
    with pytest.raises(openai.NotFoundError) as caught:
        running.client.chat.completions.create(**{**CHAT, "model": "other"})
    assert caught.value.code == "model_not_found"


def test_a_batch_that_fails_takes_nothing_else_with_it(running):
    def fail(*_: Any) -> None:
        raise RuntimeError("out of something")

    handle = running.target.register_forward_pre_hook(fail)
    try:
        with pytest.raises(openai.InternalServerError, match="RuntimeError: out of something"):
            running.client.chat.completions.create(**CHAT)
        with pytest.raises(openai.APIError, match="out of something"):
            list(running.client.chat.completions.create(**CHAT, stream=True))
        events: Any = running.client.responses.create(model=MODEL, input="x", stream=True)
        assert [event.type for event in events][-1] == "response.failed"
    finally:
        handle.remove()
    assert is_alive(running)


@pytest.mark.parametrize("method", ["push", "release"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_row_whose_text_cant_be_made_fails_alone(monkeypatch, method, stream):
    original = getattr(RowText, method)
    calls = []

    def fail(self: Any, *args: Any, **options: Any) -> Any:
        if self._stop == ("never",):
            calls.append(self)
            if len(calls) == 3 or options:
                raise KeyError("arguments")
        return original(self, *args, **options)

    monkeypatch.setattr(RowText, method, fail)
    with serving(max_batch_size=2, batch_wait=10.0) as two, ThreadPoolExecutor(1) as pool:
        create: Any = two.client.chat.completions.create
        other = pool.submit(create, **CHAT)
        wait_for(lambda: two.engine.num_waiting == 1)
        with pytest.raises(openai.APIError, match="KeyError: 'arguments'"):
            list(create(**CHAT, stop=["never"], stream=stream))
        text = other.result().choices[0].message.content
        assert text == two.greedy(two.chat_prompt("hello"))
        metrics = two.server._application.telemetry.text()
        assert re.search('finished_reason="(stop|length)"} 1.0', metrics)
        assert 'finished_reason="cancelled"} 0.0' in metrics
        wait_for(lambda: two.engine.num_running == 0)


def test_a_chat_template_that_refuses(running):
    template = running.tokenizer.chat_template
    running.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            running.client.chat.completions.create(**CHAT)
        running.tokenizer.chat_template = None
        with pytest.raises(openai.BadRequestError, match="chat template can't be applied"):
            running.client.chat.completions.create(**CHAT)
    finally:
        running.tokenizer.chat_template = template
    assert is_alive(running)


def test_a_full_queue():
    with serving(max_waiting=2, max_batch_size=1, batch_wait=0.0) as small:
        with holding(small.target) as hold:
            streams = [small.client.chat.completions.create(**CHAT, stream=True)]
            wait_for(lambda: small.engine.num_running == 1)
            streams += [small.client.chat.completions.create(**CHAT, stream=True) for _ in range(2)]
            wait_for(lambda: small.engine.num_waiting == 2)
            with pytest.raises(openai.InternalServerError, match="busy: 2 texts are") as caught:
                small.client.chat.completions.create(**CHAT)
            assert caught.value.status_code == 503
            hold.release()
        for stream in streams:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == small.greedy(small.chat_prompt("hello"))
