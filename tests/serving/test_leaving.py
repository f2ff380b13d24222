"""Clients that hang up, and servers that are told to stop."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from serving_server import MODEL, Running, serving, wait_for
from tiny_models import EOS

LONG: dict[str, Any] = {"model": MODEL, "prompt": "hello", "temperature": 0, "max_tokens": 240}


def count(running: Running, name: str, *labels: str) -> float:
    text = running.server._application.telemetry.text()
    lines = [line for line in text.splitlines() if line.startswith(f"hf_specdec:{name}{{")]
    return sum(float(line.split()[-1]) for line in lines if all(x in line for x in labels))


@pytest.fixture
def endless(running):
    """Texts without an end token, so that only a limit or a cancellation ends them."""
    configs = [model.generation_config for model in (running.target, running.plain)]
    for config in configs:
        config.eos_token_id = None
    yield
    for config in configs:
        config.eos_token_id = EOS


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_stops_its_row(slow, endless, running, stream):
    cancelled = count(running, "request_success_total", "cancelled")
    address = urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    body = json.dumps({**LONG, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_for(lambda: running.engine.num_running == 1)
    if stream:
        assert connection.getresponse().read(10).startswith(b"data: ")
    connection.close()
    # 240 tokens would take more than a second.
    start = time.monotonic()
    wait_for(lambda: running.engine.num_running == 0)
    assert time.monotonic() - start < 1.0
    wait_for(lambda: count(running, "request_success_total", "cancelled") == cancelled + 1)
    wait_for(lambda: running.gate.num_inside == 0)


def test_the_others_of_its_batch_go_on(slow, endless, running):
    expected = running.greedy("what is it", 40)
    address = urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
    stays = threading.Thread(
        target=lambda: answers.append(
            running.client.completions.create(
                model=MODEL, prompt="what is it", temperature=0, max_tokens=40
            )
        )
    )
    answers: list[Any] = []
    stays.start()
    wait_for(lambda: running.engine.num_running == 2)
    connection.close()
    stays.join(20)
    assert answers[0].choices[0].text == expected
    assert answers[0].usage.completion_tokens == 40


def test_a_client_that_hangs_up_in_the_queue_is_never_served():
    with serving(max_batch_size=1) as running:
        running.target.generation_config.eos_token_id = None
        handle = running.target.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        stream = running.client.completions.create(**LONG, stream=True)
        wait_for(lambda: running.engine.num_running == 1)
        impatient = running.client.with_options(timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            impatient.completions.create(**LONG)
        handle.remove()
        list(stream)
        wait_for(lambda: running.gate.num_inside == 0 and running.engine.num_waiting == 0)
        assert count(running, "batch_size_count") == 1


def test_stopping_finishes_what_runs_and_refuses_what_is_new():
    with serving() as running:
        expected = running.greedy("hello", 60)
        handle = running.target.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        stream = running.client.completions.create(**{**LONG, "max_tokens": 60}, stream=True)
        wait_for(lambda: running.engine.num_running == 1)
        running.server.drain()
        with pytest.raises(openai.InternalServerError, match="The server is stopping") as caught:
            running.client.completions.create(**LONG)
        assert caught.value.status_code == 503
        address = urlsplit(running.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 503
        connection.close()
        assert "".join(chunk.choices[0].text for chunk in stream) == expected
        handle.remove()
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_patience_ends():
    with serving(shutdown_timeout=0.2) as running:
        running.target.generation_config.eos_token_id = None
        running.target.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        stream = running.client.completions.create(**LONG, stream=True)
        wait_for(lambda: running.engine.num_running == 1)
        running.server.drain()
        with pytest.raises((openai.APIError, Exception), match="stopping|peer closed"):
            list(stream)
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_the_command_serves_until_a_signal(pair_folders: tuple[Path, Path]):
    """The real command line in a process of its own; tests of its help are elsewhere."""
    target, drafter = pair_folders
    command = [sys.executable, "-m", "hf_specdec", "serve", str(target), "--port", "0"]
    command += ["--spec-model", str(drafter), "--spec-tokens", "2", "--served-model-name", "tiny"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                url = found[1]
                break
        assert url is not None
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="hello", max_tokens=5)
        assert answer.usage.speculation["num_draft_tokens"] > 0  # type: ignore[union-attr]
        assert answer.usage.speculation["num_accepted_tokens_per_pos"][2:] == []  # type: ignore[union-attr]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
