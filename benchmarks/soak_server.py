"""An hour of mixed requests to one server: right answers, flat memory, nobody left waiting.

    python benchmarks/soak_server.py --minutes 60 --json docs/soak_server.json

A tiny pair of random models, float32, behind ``hf-specdec serve`` in a process of its own, so that
memory is the server's alone. Clients ask at once, streamed and not; some hang up in the middle,
some ask for what can't be served, and now and then a batch fails in the middle of a forward. Every
greedy answer must be what plain ``generate`` says. The exit code is 1 if one wasn't, or if rows,
threads, sockets or memory stay behind. Linux only: memory is read from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from soak import machine
from soak_models import Settings, make_pair, make_tokenizer
from soak_run import Report

MODEL, CLIENTS, FAILING = "tiny", 6, 97
# What is refused, and how.
BAD: tuple[tuple[dict[str, Any], int], ...] = (
    ({"max_tokens": 10**9}, 400),
    ({"temperature": -1}, 400),
    ({"prompt": []}, 400),
    ({"prompt": [10**6]}, 400),
    ({"n": "two"}, 400),
    ({"no_such_field": 1}, 400),
    ({"model": "another"}, 404),
)


def serve(port: int) -> None:
    """The server process: every so many forwards one fails."""
    import hf_specdec
    from hf_specdec.cli.options import PairSettings
    from hf_specdec.cli.serve import ServeSettings, make_server

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # every batch that fails on purpose would be told of
    pair = make_pair("llama")
    forwards = 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards % FAILING == 0:
            raise RuntimeError("injected")

    pair.target.register_forward_pre_hook(fail)
    hf_specdec.attach(pair.target, {"model": pair.speculator})
    settings = ServeSettings(
        pair=PairSettings("unused"),
        host="127.0.0.1",
        port=port,
        served_model_name=MODEL,
        max_model_len=None,
        default_max_tokens=24,
        max_batch_size=8,
        batch_wait=0.005,
        max_waiting=256,
        concurrent_batches=2,
        chat_template_kwargs={},
        shutdown_timeout=20.0,
        metrics_prefix="hf_specdec",
        enable_cors=False,
        log_level="critical",
    )
    make_server(pair.target, make_tokenizer(), settings).run()


class Client:
    """A connection at a time, to the server of this machine."""

    def __init__(self, port: int):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def get(self, path: str) -> dict[str, Any]:
        """JSON from an address."""
        self._connection.request("GET", path)
        return json.loads(self._connection.getresponse().read())

    def post(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        """An answer to be read to its end, or else to be left by `close`."""
        # A server may close a connection that was idle; a new one for each request can't be caught.
        self.close()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return self._connection.getresponse()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class Clients:
    """Threads that ask until the time is over."""

    def __init__(self, port: int, seed: int, minutes: float):
        self._port = port
        self._seed = seed
        self._until = time.monotonic() + 60 * minutes
        self._pair, self._tokenizer = make_pair("llama"), make_tokenizer()
        self._lock = threading.Lock()
        self._number = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def work(self) -> None:
        """One client."""
        client = Client(self._port)
        while time.monotonic() < self._until:
            with self._lock:
                number, self._number = self._number, self._number + 1
            choice = random.Random(f"{self._seed}:{number}")
            try:
                name, problem = self._ask(client, choice)
            except Exception as error:
                name, problem = "broken", repr(error)
                client.close()
            with self._lock:
                self.counts[name] += 1
                if problem:
                    self.wrong.append(f"request {number}: {problem}")
        client.close()

    def _ask(self, client: Client, choice: random.Random) -> tuple[str, str | None]:
        index, length = choice.randrange(len(self._pair.prompts)), choice.randint(1, 24)
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(self._pair.prompts[index]),
            "max_tokens": length,
            "temperature": 0,
        }
        kind = choice.choices(("ask", "stream", "sample", "bad", "leave"), (40, 30, 10, 12, 8))[0]
        if kind == "bad":
            change, status = choice.choice(BAD)
            answer = client.post({**body, **change})
            answer.read()
            got = answer.status
            return "refused", None if got == status else f"{change}: {got}, not {status}"
        if kind == "leave":
            client.post({**body, "stream": True}).readline()
            client.close()
            return "left", None
        if kind == "sample":
            body |= {"temperature": 0.9, "seed": choice.randrange(2**31), "n": 2}
        if kind == "stream":
            status, text = self._streamed(client, body)
        else:
            answer = client.post(body)
            status, text = answer.status, answer.read().decode()
            if status == 200:
                text = json.loads(text)["choices"][0]["text"]
        if status == 500 and "injected" in text:
            return "failed with a batch", None
        if status != 200:
            return "broken", f"{kind}: {status} {text[:200]}"
        if kind == "sample":
            return "sampled", None
        with self._lock:
            said = self._pair.text(index, length, Settings())
        expected = self._tokenizer.decode(said, skip_special_tokens=True)
        return kind, None if text == expected else f"{text!r} is not {expected!r}"

    def _streamed(self, client: Client, body: dict[str, Any]) -> tuple[int, str]:
        text, answer = "", client.post({**body, "stream": True})
        for line in answer.read().decode().splitlines():
            if "injected" in line:
                return 500, line
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
        return answer.status, text


def of_process(pid: int) -> tuple[float, int, int]:
    """Resident MiB, threads and file descriptors of a process."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files


def idle(client: Client, seconds: float = 30) -> dict[str, Any]:
    """What /health says once nobody is waiting any more, or at the end of the time."""
    deadline = time.monotonic() + seconds
    while True:
        health = client.get("/health")
        if health.get("running") == health.get("waiting") == 0 or time.monotonic() > deadline:
            return health
        time.sleep(0.2)


def soak(arguments: argparse.Namespace, pid: int) -> dict[str, Any]:
    """Ask for so long; what was seen."""
    clients = Clients(arguments.port, arguments.seed, arguments.minutes)
    report, start = Report(arguments.seed), time.monotonic()
    before = of_process(pid)
    threads = [threading.Thread(target=clients.work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        report.seconds = time.monotonic() - start
        report.memory.append((report.seconds, of_process(pid)[0]))
        time.sleep(max(min(arguments.minutes, 10), 1))
    client = Client(arguments.port)
    health = idle(client)
    client.close()
    time.sleep(6)  # connections that were kept alive close by themselves
    after = of_process(pid)
    return {
        "requests": dict(clients.counts),
        "wrong": clients.wrong[:50],
        "num_wrong": len(clients.wrong),
        "health": health,
        "before": before,
        "after": after,
        "memory": report.memory,
        "growth_mib_per_hour": report.growth(),
    }


def problems(numbers: dict[str, Any], most_growth: float) -> list[str]:
    """What is wrong."""
    found = [f"{numbers['num_wrong']} wrong answers"] if numbers["num_wrong"] else []
    if numbers["health"].get("running") or numbers["health"].get("waiting"):
        found.append(f"rows that are stuck: {numbers['health']}")
    # The pool of the application's own threads fills up once; sockets must be gone.
    if numbers["after"][2] > numbers["before"][2] + 2:
        found.append(f"file descriptors: {numbers['before'][2]} -> {numbers['after'][2]}")
    growth = numbers["growth_mib_per_hour"]
    if growth is not None and growth > most_growth:
        found.append(f"memory grows by {growth:.1f} MiB an hour")
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--most-growth", type=float, default=16, help="MiB an hour")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.port)
        return
    command = [sys.executable, __file__, "--serve", "--port", str(arguments.port)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                Client(arguments.port).get("/health")
                break
            time.sleep(0.5)
        numbers = soak(arguments, process.pid)
    finally:
        process.terminate()
        process.wait(60)
    found = problems(numbers, arguments.most_growth)
    for name, value in numbers.items():
        if name != "memory":
            print(f"{name}: {value}")
    print("\n".join(found) or "nothing is wrong")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "numbers": numbers}, indent=2) + "\n"
        )
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
