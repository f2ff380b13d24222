"""A thousand prompts under `accelerate launch`: one process is killed, the same command goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli.app import app

COUNT = 1000
ROOT = Path(hf_specdec.__file__).parents[1]
OPTIONS = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", "--batch-size", "32"]


def launch(*command: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Without GPUs accelerate starts several processes by this option, too.
    launcher = ["-m", "accelerate.commands.launch", "--quiet", "--multi_gpu"]
    return subprocess.Popen(
        [sys.executable, *launcher, "--num_processes", "2", "--main_process_port", "0"]
        + ["-m", "hf_specdec", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def kill_process_1(output: Path) -> int:
    """Kill it once it has written two batches; returns its id."""
    part = output.with_name(f"{output.name}.part-001")
    until = time.monotonic() + 300
    while not part.exists() or part.read_bytes().count(b"\n") < 64:
        assert time.monotonic() < until
        time.sleep(0.005)
    pid = json.loads(part.with_name(f"{part.name}.lock.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed")
def test_every_prompt_is_answered_once(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    source, output, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    # With these no two tokens are nearer to each other than 1e-4, so the batch can't decide.
    draw = random.Random(0)
    prompts = [
        "".join(draw.choice("abcdefgh ,") for _ in range(draw.randint(1, 12))) for _ in range(COUNT)
    ]
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    pair = [str(pair_folders[0]), "--spec-model", str(pair_folders[1])]
    command = ["generate", *pair, *OPTIONS, "--input", str(source), "--output"]

    first = launch(*command, str(output))
    pid = kill_process_1(output)
    said, _ = first.communicate(timeout=120)
    assert first.returncode != 0
    assert f"Process 1 of 2 (pid {pid} on " in said
    assert "died without a word: it was killed" in said
    assert "Of its 500 prompts " in said
    assert " of 1000 texts are kept. Run the same command again to go on" in said
    kept = [
        path for path in tmp_path.glob("out.jsonl.part-*") if path.suffix not in (".lock", ".json")
    ]
    num_kept = sum(path.read_bytes().count(b"\n") for path in kept)
    assert 64 <= num_kept < COUNT

    second = launch(*command, str(output))
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert f"{num_kept} of 1000 prompts are done already" in said
    assert CliRunner().invoke(app, [*command, str(whole)]).exit_code == 0
    rows, expected = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (output, whole)
    )
    assert [row["index"] for row in rows] == list(range(COUNT))
    assert [row["prompt"] for row in rows] == prompts
    assert [row["text"] for row in rows] == [row["text"] for row in expected]
    assert sorted(path.name for path in tmp_path.glob("out.*")) == [
        "out.jsonl",
        "out.jsonl.settings.json",
    ]
