"""Prompts shared by processes that die, fail, are stopped, or look at another folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared_runs import (
    Forked,
    answer,
    answer_all,
    free_port,
    hang_after,
    indices_of,
)

import hf_specdec
from hf_specdec.cli.processes import Processes
from hf_specdec.cli.results_file import ResultsFile

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked and killed")
ROOT = Path(hf_specdec.__file__).parents[1]


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("log-"))


@pytest.mark.parametrize(("count", "number"), [(7, 2), (11, 4), (3, 4)])
def test_uneven_shares_are_joined_in_order(tmp_path: Path, count: int, number: int) -> None:
    output = tmp_path / "out.jsonl"
    run = Forked(output, count, number)
    assert run.wait() == [0] * number
    assert indices_of(output) == list(range(count))
    assert f"{count} texts are in" in run.log(0)
    assert files_of(tmp_path) == ["out.jsonl", "out.jsonl.settings.json"]


@pytest.mark.parametrize(("number", "again"), [(2, 4), (4, 2), (4, 1)])
def test_a_killed_process_is_reported_and_its_work_done_by_the_next_run(
    tmp_path: Path, number: int, again: int
) -> None:
    output, victim = tmp_path / "out.jsonl", number - 1
    run = Forked(output, 21, number, hang_after(2, victim))
    pid = run.processes[victim].pid
    run.wait_until_written(victim, 2)
    run.kill(victim)
    codes = run.wait()
    assert codes == [1, *[0] * (number - 2), -signal.SIGKILL]
    said = run.log(0)
    assert f"Process {victim} of {number} (pid {pid} on " in said
    assert "died without a word: it was killed, for example for want of memory" in said
    mine = list(range(21))[victim::number]
    first = f"Of its {len(mine)} prompts {len(mine) - 2} have no text: {mine[2]}, "
    assert first in said
    assert f"{21 - len(mine) + 2} of 21 texts are kept. Run the same command again" in said

    def generate(rank, indices, write):
        # Only what is missing is made again.
        assert set(indices) <= set(mine[2:])
        answer_all(rank, indices, write)

    second = Forked(output, 21, again, generate)
    assert second.wait() == [0] * again
    assert f"{21 - len(mine) + 2} of 21 prompts are done already" in second.log(0)
    assert indices_of(output) == list(range(21))
    assert files_of(tmp_path) == ["out.jsonl", "out.jsonl.settings.json"]


def test_a_killed_main_process_leaves_the_others_work(tmp_path: Path) -> None:
    """Process 0 keeps the store as well, here; the others do their share without it."""
    output = tmp_path / "out.jsonl"

    def generate(rank, indices, write):
        answer_all(rank, indices[:1], write)
        if rank == 0:
            time.sleep(60)
        time.sleep(1)
        answer_all(rank, indices[1:], write)

    run = Forked(output, 9, 2, generate)
    run.wait_until_written(0, 1)
    run.wait_until_written(1, 1)
    run.kill(0)
    assert run.wait() == [-signal.SIGKILL, 0]
    assert Forked(output, 9, 2).wait() == [0, 0]
    assert indices_of(output) == list(range(9))


def test_a_process_that_fails_is_reported_with_its_error(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    def generate(rank, indices, write):
        if rank == 2:
            raise MemoryError("no room\nfor more")
        answer_all(rank, indices, write)

    run = Forked(output, 10, 4, generate)
    assert run.wait() == [1, 0, 1, 0]
    assert ") failed: MemoryError: no room." in run.log(0)
    assert "Of its 2 prompts 2 have no text: 2, 6." in run.log(0)


def test_what_process_0_refuses_ends_the_others(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("notes\n")
    run = Forked(output, 4, 2)
    assert run.wait() == [1, 1]
    assert "exists, but not out.jsonl.settings.json" in run.log(0)
    assert "process 1 has nothing to do: process 0 (pid " in run.log(1)
    assert output.read_text() == "notes\n"


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    # Left by an earlier run, and as good as what this one begins.
    settings = ResultsFile(there / "out.jsonl")
    with settings.lock():
        settings.prepare({"of": "a test"})
    run = Forked([here / "out.jsonl", there / "out.jsonl"], 4, 2)
    assert run.wait() == [1, 1]
    assert "process 1 doesn't see the file that process 0 (pid " in run.log(1)
    assert "All machines must see the same folder under the same name" in run.log(1)
    assert "failed: ValueError: --output" in run.log(0)


def test_processes_started_with_other_settings_are_refused(tmp_path: Path) -> None:
    run = Forked(tmp_path / "out.jsonl", 4, 2, settings=lambda rank: {"tokens": 4 + rank})
    assert run.wait() == [1, 1]
    assert "rows made with other settings (tokens: 4, now 5)" in run.log(1)


def test_sigterm_ends_all_and_one_says_how_to_go_on(tmp_path: Path) -> None:
    """As a launcher does it: one process is gone, the others are stopped."""
    output = tmp_path / "out.jsonl"

    def generate(rank, indices, write):
        answer_all(rank, indices[:2], write)
        time.sleep(60)

    run = Forked(output, 16, 4, generate)
    for rank in range(4):
        run.wait_until_written(rank, 2)
    for rank in (1, 2, 0, 3):
        run.kill(rank, signal.SIGTERM if rank != 1 else signal.SIGKILL)
    assert run.wait() == [143, -signal.SIGKILL, 143, 143]
    said = [run.log(rank) for rank in range(4)]
    assert "Process 1 of 4 (pid " in said[0]
    assert "Of its 4 prompts 2 have no text: 9, 13." in said[0]
    assert "8 of 16 texts are kept. Run the same command again" in said[0]
    assert said[2] == said[3] == ""
    assert Forked(output, 16, 2).wait() == [0, 0]
    assert indices_of(output) == list(range(16))


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first = Forked(output, 6, 2, hang_after(1, 1))
    pids = [process.pid for process in first.processes]
    part = output.with_name("out.jsonl.part-001")
    first.wait_until_written(1, 1)
    second = Forked(output, 6, 1)
    assert second.wait() == [1]
    assert f"--output {output} is being written by another run (process {pids[0]} on " in (
        second.log(0)
    )
    # The main process is gone, another one still writes: its part isn't taken from it.
    first.kill(0)
    first.processes[0].join()
    third = Forked(output, 6, 1)
    assert third.wait() == [1]
    assert f"--output {part} is being written by another run (process {pids[1]} on " in third.log(0)
    assert "stop it, then run this again; or name another --output" in third.log(0)
    first.kill(1)
    assert first.wait() == [-signal.SIGKILL] * 2
    # What the dead have left stands in nobody's way.
    assert "out.jsonl.part-001.lock" in files_of(tmp_path)
    assert Forked(output, 6, 2).wait() == [0, 0]
    assert indices_of(output) == list(range(6))
    assert files_of(tmp_path) == ["out.jsonl", "out.jsonl.settings.json"]


def test_a_part_that_was_moved_away_is_missed(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    def generate(rank, indices, write):
        answer_all(rank, indices, write)
        if rank == 1:
            output.with_name("out.jsonl.part-001").unlink()

    run = Forked(output, 5, 2, generate)
    assert run.wait() == [1, 0]
    assert "prompts 1, 3 have no text in" in run.log(0)


# Named as the command is, so that hf_specdec doesn't import transformers.
RESTARTED = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from hf_specdec.cli.processes import Processes
from hf_specdec.cli.results_file import ResultsFile
from hf_specdec.cli.saving import SavedRun

def generate(indices, write):
    for index in indices:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and processes.rank == 2 and index > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        write({"index": index, "text": f"answer {index}"})

processes = Processes.of_launcher()
log = Console(file=sys.stderr, width=200)
SavedRun(ResultsFile(Path(sys.argv[1])), {}, 30, processes, log).run(generate)
"""


def test_torchrun_restarts_four_processes_that_go_on(tmp_path: Path) -> None:
    script, output = tmp_path / "hf-specdec.py", tmp_path / "out.jsonl"
    script.write_text(RESTARTED)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", "1"]
    port = ["--master-port", str(free_port())]
    result = subprocess.run(
        [sys.executable, *launcher, *port, script, output],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "of 30 prompts are done already" in result.stderr
    assert "30 texts are in" in result.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows == [answer(index) for index in range(30)]


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    processes = Processes.of_launcher()
    assert (processes.is_main, processes.count, processes.device("auto")) == (True, 1, "auto")
    assert processes.roll is None


def test_an_environment_that_is_no_launchers_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"has WORLD_SIZE=2 and RANK=None: a launcher of several"):
        Processes.of_launcher()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, but the processes can't meet \(.*MASTER_"):
        Processes.of_launcher()


def test_processes_that_do_not_come_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from hf_specdec.cli import processes

    monkeypatch.setattr(processes, "_ARRIVAL", timedelta(seconds=1))
    port = str(free_port())
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(OSError, match=f"process 0 of 2 has waited at 127.0.0.1:{port}: not all"):
        Processes.of_launcher()
