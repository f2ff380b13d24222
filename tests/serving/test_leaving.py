"""Clients that hang up, and servers that are told to stop."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from serving_server import MODEL, Running, holding, serving, wait_for
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


def hang_up_later(running: Running, **fields: Any) -> http.client.HTTPConnection:
    """A request that was sent, on a connection for the test to close."""
    address = urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**LONG, **fields}), headers)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_stops_its_row(endless, running, stream):
    cancelled = count(running, "request_success_total", "cancelled")
    with holding(running.target, after=3) as hold:
        connection = hang_up_later(running, stream=stream)
        wait_for(lambda: running.engine.num_running == 1)
        if stream:
            response = connection.getresponse()
            assert response.read(6) == b"data: "
            response.close()
        connection.close()
        # The server has heard of it before the row could have come to its end.
        wait_for(lambda: running.gate.num_inside == 0)
        hold.release()
    wait_for(lambda: count(running, "request_success_total", "cancelled") == cancelled + 1)
    assert running.engine.num_running == 0


def test_the_others_of_its_batch_go_on():
    with serving(max_batch_size=2, batch_wait=10.0) as running, ThreadPoolExecutor(1) as pool:
        expected = running.greedy("what is it", 40)
        with holding(running.target, after=3) as hold:
            connection = hang_up_later(running)
            create: Any = running.client.completions.create
            stays = pool.submit(
                create,
                **{**LONG, "prompt": "what is it", "max_tokens": 40},
            )
            wait_for(lambda: running.engine.num_running == 2)
            connection.close()
            wait_for(lambda: running.gate.num_inside == 1)
            hold.release()
        assert stays.result().choices[0].text == expected
        assert count(running, "request_success_total", "cancelled") == 1


def test_a_client_that_hangs_up_in_the_queue_is_never_served():
    with serving(max_batch_size=1, max_waiting=1) as running:
        with holding(running.target) as hold:
            stream = running.client.completions.create(**LONG, stream=True)
            wait_for(lambda: running.engine.num_running == 1)
            connection = hang_up_later(running)
            wait_for(lambda: running.engine.num_waiting == 1)
            connection.close()
            wait_for(lambda: running.gate.num_inside == 1)
            # Its place is free at once, though the batch goes on.
            assert running.engine.num_waiting == 0
            later = running.client.completions.create(**{**LONG, "max_tokens": 2}, stream=True)
            assert running.engine.num_waiting == 1
            hold.release()
        list(stream)
        list(later)
        wait_for(lambda: running.gate.num_inside == 0 and running.engine.num_waiting == 0)
        assert count(running, "batch_size_count") == 2


def test_stopping_finishes_what_has_come_in_and_refuses_what_is_new():
    with serving(max_batch_size=1) as running:
        expected = running.greedy("hello", 60)
        with holding(running.target, after=2) as hold:
            fields: Any = {**LONG, "max_tokens": 60, "stream": True}
            stream = running.client.completions.create(**fields)
            wait_for(lambda: running.engine.num_running == 1)
            queued = running.client.completions.create(**fields)
            wait_for(lambda: running.engine.num_waiting == 1)
            running.server.drain()
            with pytest.raises(openai.InternalServerError, match="is stopping") as caught:
                running.client.completions.create(**LONG)
            assert caught.value.status_code == 503
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{running.url}/health", timeout=10)
            hold.release()
        for answer in (stream, queued):
            assert "".join(chunk.choices[0].text for chunk in answer) == expected
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_patience_ends():
    with serving(shutdown_timeout=0.0) as running:
        running.target.generation_config.eos_token_id = None
        with holding(running.target, after=3) as hold:
            stream = running.client.completions.create(**LONG, stream=True)
            wait_for(lambda: running.engine.num_running == 1)
            running.server.drain()
            wait_for(lambda: not running.engine.is_alive)
            hold.release()
        with pytest.raises(Exception, match="is stopping|peer closed|disconnected"):
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
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
