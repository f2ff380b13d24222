"""`hf-specdec train` in processes of its own: killed and resumed, and two that train together."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_command import SMALL, jsonl, words

from hf_specdec.training import Corpus
from hf_specdec.training.result import read_result

ROOT = Path(__file__).parents[2]
# Long enough for a process to be killed in the midst of it.
LONG = ["--tokens", "12000", "--answer-tokens", "20", "--steps", "300", "--text-steps", "20"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def command(target: str, *options: str) -> list[str]:
    return [*("-m", "hf_specdec", "train", target), *SMALL, *options]


def kill_when(arguments: list[str], ready) -> None:
    """Start a process and kill it a random moment after ``ready()``."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(random.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_killed_and_resumed(train, target_folder, tmp_path):
    """At a random moment of generating, and again of training: the same weights in the end."""
    texts = jsonl(tmp_path / "t.jsonl", [{"text": words(i, 200)} for i in range(200)])
    options = [*LONG, "--data", texts, "--text-tokens", "3000"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = train("--out", whole, *options)
    assert result.exit_code == 0, result.output
    arguments = command(target_folder, "--out", str(cut), *options)
    own = cut / "corpora" / "prompts"
    kill_when(arguments, lambda: any(own.glob("part-*")))
    before = len(Corpus(own))
    assert 0 < before < 12000
    kill_when(arguments, (cut / "training" / "checkpoint.pt").exists)
    assert not (cut / "training" / "result.json").exists()
    result = train("--out", cut, *options)
    assert result.exit_code == 0, result.output
    for name in ("text", "prompts"):
        ours, theirs = (Corpus(folder / "corpora" / name) for folder in (cut, whole))
        assert torch.equal(ours.tokens, theirs.tokens)
        everything = torch.arange(len(ours))
        assert torch.equal(ours.hidden[everything], theirs.hidden[everything])
    expected = load_file(whole / "model.safetensors")
    for name, tensor in load_file(cut / "model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name
    assert read_result(cut)["acceptance"] == read_result(whole)["acceptance"]
    log = Path("training", "log.jsonl")
    assert (cut / log).read_text() == (whole / log).read_text()


def test_two_processes_are_one_with_twice_the_accumulation(train, target_folder, tmp_path):
    pytest.importorskip("accelerate")
    corpora = tmp_path / "corpora"
    # Generated together: each process writes its part.
    make = ["--corpus", str(corpora), "--tokens", "2000"]
    together, alone = tmp_path / "together", tmp_path / "alone"
    options = ["--kind", "mtp", "--batch-size", "4", "--steps", "10"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    arguments = command(target_folder, "--out", str(together), *make, *options)
    subprocess.run(
        [sys.executable, *launcher, *arguments], env=environment(), check=True, timeout=200,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    parts = sorted(folder.name for folder in (corpora / "chat").iterdir())
    assert parts == ["process-0-of-2", "process-1-of-2"]
    first, second = (Corpus(corpora / "chat" / part).tokens.tolist() for part in parts)
    assert first != second
    assert read_result(together)["hardware"]["processes"] == 2
    result = train(
        "--out", alone, "--corpus", corpora, *options, "--tokens", "0", "--accumulation", "2"
    )
    assert result.exit_code == 0, result.output
    ours, theirs = (
        torch.load(folder / "training" / "checkpoint.pt")["model"] for folder in (together, alone)
    )
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)
