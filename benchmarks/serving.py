"""The server on the demo pair: throughput, and what stays of memory after many requests.

    python benchmarks/serving.py                       # throughput of all servers, in one run
    python benchmarks/serving.py --servers batched serial --requests 64 --clients 16
    python benchmarks/serving.py --soak 200            # answers checked, memory before and after

Every server is a process of its own, started before the first request, and idle while another is
measured. A round sends the same chat requests (greedy, closed loop: a client asks again as soon as
it has its answer) to one server after the other; the table gives medians over rounds.

    batched        hf-specdec serve, --max-batch-size of --clients
    serial         hf-specdec serve --max-batch-size 1: one request at a time
    undrafted      hf-specdec serve --spec-tokens 0: batches without drafts
    transformers   transformers serve, without speculation

The soak runs in float32, where every answer must equal plain greedy ``generate`` of the same
prompt. One request in twenty is abandoned in the middle. Linux only: memory is read from /proc.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.benchmarking import PROMPT_SETS
from hf_specdec.cli.demo_pair import DRAFTER_DIRECTORY, load_demo_pair

PROMPTS = PROMPT_SETS["general"]
SERVERS = ("batched", "serial", "undrafted", "transformers")
SOAK_CLIENTS = 8
ABANDONED = 20  # one request in so many


class Server:
    """A server process, and the client for it."""

    def __init__(self, name, target, drafter, arguments, dtype):
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if name == "transformers":
            command = ["-m", "transformers.cli.transformers", "serve", target]
        else:
            command = ["-m", "hf_specdec", "serve", target, "--spec-model", drafter]
            command += ["--max-batch-size", "1" if name == "serial" else str(arguments.clients)]
            if name == "undrafted":
                command += ["--spec-tokens", "0"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
        command += ["--device", arguments.device, "--log-level", "warning"]
        self.model = target
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=self.log, stderr=self.log
        )
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600
        )

    def wait(self, seconds=300):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.2)
        self.log.seek(0)
        raise SystemExit(f"{self.name} did not start:\n{self.log.read().decode()[-2000:]}")

    def memory(self):
        """MiB that the process holds now, and has held at most."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return tuple(
            int(re.search(rf"{key}:\s+(\d+)", text)[1]) / 1024 for key in ("VmRSS", "VmHWM")
        )

    def stop(self):
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


@contextlib.contextmanager
def running(names, target, drafter, arguments, dtype, console):
    servers = [Server(name, target, drafter, arguments, dtype) for name in names]
    try:
        with console.status(f"starting {', '.join(names)}"):
            for server in servers:
                server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


@contextlib.contextmanager
def pair_folders(arguments, console):
    """Folders of target and drafter; the demo's target is written to one for the servers."""
    if arguments.target is not None:
        yield arguments.target, arguments.drafter or str(DRAFTER_DIRECTORY)
        return
    with tempfile.TemporaryDirectory() as folder:
        with console.status("writing the demo's target to a folder"):
            pair = load_demo_pair(torch.float32, torch.device("cpu"))
            pair.target.save_pretrained(folder)
            pair.tokenizer.save_pretrained(folder)
            del pair
        yield folder, arguments.drafter or str(DRAFTER_DIRECTORY)


def ask(server, prompt, max_tokens):
    start = time.monotonic()
    answer = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
    )
    return answer, time.monotonic() - start


def measure(server, prompts, arguments, advance):
    """One round: seconds, tokens, latencies, answers."""

    def one(job):
        index, prompt = job
        # Requests of different lengths, as clients send them.
        result = ask(server, prompt, arguments.max_tokens // (1 + index % 3))
        advance()
        return result

    start = time.monotonic()
    with ThreadPoolExecutor(arguments.clients) as pool:
        results = list(pool.map(one, enumerate(prompts)))
    seconds = time.monotonic() - start
    tokens = sum(answer.usage.completion_tokens for answer, _ in results)
    speculation = [getattr(answer.usage, "speculation", None) or {} for answer, _ in results]
    drafts = sum(s.get("num_drafts", 0) for s in speculation)
    accepted = sum(s.get("num_accepted_tokens", 0) for s in speculation)
    return {
        "tokens_per_second": tokens / seconds,
        "latencies": sorted(latency for _, latency in results),
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "answers": [answer.choices[0].message.content for answer, _ in results],
    }


def throughput(arguments, console):
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(arguments.requests)]
    rounds = {name: [] for name in arguments.servers}
    with (
        pair_folders(arguments, console) as (target, drafter),
        running(arguments.servers, target, drafter, arguments, arguments.dtype, console) as servers,
        Progress(console=console, transient=True) as progress,
    ):
        for server in servers:
            ask(server, "Hello!", 8)
        total = arguments.rounds * len(servers) * len(prompts)
        task = progress.add_task("asking", total=total)
        for _ in range(arguments.rounds):
            for server in servers:
                rounds[server.name].append(
                    measure(server, prompts, arguments, lambda: progress.advance(task))
                )
        memory = {server.name: server.memory() for server in servers}
    rows = [summary(name, rounds, memory[name]) for name in arguments.servers]
    show(rows, arguments, console)
    return rows


def summary(name, rounds, memory):
    own = rounds[name]
    base = rounds.get("transformers") or rounds[list(rounds)[-1]]
    ratios = [
        a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(own, base, strict=True)
    ]
    latencies = sorted(latency for r in own for latency in r["latencies"])
    same = sum(a == b for a, b in zip(own[0]["answers"], base[0]["answers"], strict=True))
    return {
        "server": name,
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in own),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "latency_median": statistics.median(latencies),
        "latency_p95": latencies[int(0.95 * (len(latencies) - 1))],
        "mean_acceptance_length": own[0]["mean_acceptance_length"],
        "same_answers": same,
        "memory_mib": memory[0],
    }


def show(rows, arguments, console):
    table = Table(title=f"{arguments.requests} requests, {arguments.clients} clients")
    base = "transformers" if "transformers" in arguments.servers else arguments.servers[-1]
    for column in ("server", "tok/s", f"to {base}", "latency", "p95", "MAL", "same", "memory"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for row in rows:
        low, high = row["ratio_range"]
        mal = row["mean_acceptance_length"]
        table.add_row(
            row["server"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}x ({low:.2f}-{high:.2f})",
            f"{row['latency_median']:.2f} s",
            f"{row['latency_p95']:.2f} s",
            "-" if mal is None else f"{mal:.2f}",
            f"{row['same_answers']}/{arguments.requests}",
            f"{row['memory_mib']:.0f} MiB",
        )
    console.print(table)


def expected_texts(target, jobs, advance):
    """What plain greedy ``generate`` says to each (prompt, limit), on one thread."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = {}
    for prompt, limit in jobs:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        out = model.generate(**inputs, do_sample=False, max_new_tokens=limit)
        new = out[0, inputs["input_ids"].shape[1] :]
        texts[prompt, limit] = tokenizer.decode(new, skip_special_tokens=True)
        advance()
    return texts


def soak(arguments, console):
    kinds = [
        (prompt, limit)
        for prompt, limit in zip(PROMPTS * 3, [16, 48, 32] * len(PROMPTS), strict=True)
    ][: max(arguments.soak // 5, 1)]
    with (
        pair_folders(arguments, console) as (target, drafter),
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("plain generate", total=len(kinds))
        expected = expected_texts(target, kinds, lambda: progress.advance(task))
        with running(["batched"], target, drafter, arguments, "float32", console) as [server]:
            report = soak_server(server, kinds, expected, arguments, progress)
    console.print(
        f"{report['answered']} of {report['requests']} requests answered, {report['equal']} equal "
        f"to plain generate, {report['abandoned']} abandoned by the client"
    )
    levels = ", ".join(f"{level:.0f}" for level in report["memory_mib"])
    console.print(f"memory, MiB: {levels} (first: before; most: {report['memory_peak_mib']:.0f})")
    if report["equal"] < report["answered"] or report["answered"] < report["requests"]:
        raise SystemExit("some answers are missing or differ")
    return report


def soak_server(server, kinds, expected, arguments, progress):
    done, equal, levels, lock = 0, 0, [], threading.Lock()
    for prompt, limit in kinds[:SOAK_CLIENTS]:  # everything is loaded and compiled once
        ask(server, prompt, limit)
    levels.append(server.memory()[0])
    task = progress.add_task("asking", total=arguments.soak)

    def one(index):
        nonlocal done, equal
        prompt, limit = kinds[index * 7 % len(kinds)]
        if index % ABANDONED == 0:
            abandon(server, prompt)
        if index % 2:
            text = streamed(server, prompt, limit)
        else:
            text = ask(server, prompt, limit)[0].choices[0].message.content
        with lock:
            done += 1
            equal += text == expected[prompt, limit]
            progress.advance(task)
            if done % max(arguments.soak // 8, 1) == 0:
                levels.append(server.memory()[0])

    with ThreadPoolExecutor(SOAK_CLIENTS) as pool:
        list(pool.map(one, range(arguments.soak)))
    return {
        "requests": arguments.soak,
        "answered": done,
        "equal": equal,
        "abandoned": len(range(0, arguments.soak, ABANDONED)),
        "memory_mib": [*levels, server.memory()[0]],
        "memory_peak_mib": server.memory()[1],
    }


def chat_stream(server, prompt, limit):
    return server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=limit,
        stream=True,
    )


def streamed(server, prompt, limit):
    pieces = []
    for chunk in chat_stream(server, prompt, limit):
        pieces.append(chunk.choices[0].delta.content or "")
    return "".join(pieces)


def abandon(server, prompt):
    """Ask for a long answer, and hang up after its first words."""
    stream = chat_stream(server, prompt, 1000)
    for count, _ in enumerate(stream):
        if count == 3:
            break
    stream.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", help="folder of a target; by default the demo's")
    parser.add_argument("--drafter", help="folder of its drafter; by default the shipped one")
    parser.add_argument("--soak", type=int, metavar="N", help="the soak, with N requests")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    console = Console()
    numbers = soak(arguments, console) if arguments.soak else throughput(arguments, console)
    machine = {
        "dtype": "float32" if arguments.soak else arguments.dtype,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "clients": SOAK_CLIENTS if arguments.soak else arguments.clients,
        "max_tokens": arguments.max_tokens,
    }
    console.print(", ".join(f"{k}: {v}" for k, v in machine.items()))
    if arguments.json:
        result = {"machine": machine, "numbers": numbers}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
