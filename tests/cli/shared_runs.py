"""Runs of several processes without models: forked, so that they begin soon, and really killed."""

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_specdec.cli import roll_call, saving
from hf_specdec.cli.processes import Processes
from hf_specdec.cli.results_file import ResultsFile
from hf_specdec.cli.saving import SavedRun

SETTINGS = {"of": "a test"}
FORK: Any = multiprocessing.get_context("fork")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answer(index: int) -> dict[str, Any]:
    return {"index": index, "text": f"answer {index}"}


def indices_of(path: Path) -> list[int]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [answer(row["index"]) for row in rows]
    return [row["index"] for row in rows]


def answer_all(rank: int, indices: list[int], write: Any) -> None:
    """What a process does that works."""
    for index in indices:
        write(answer(index))


def hang_after(number: int, victim: int) -> Callable[[int, list[int], Any], None]:
    """One process writes so many answers and goes on for ever; the others work."""

    def generate(rank: int, indices: list[int], write: Any) -> None:
        if rank != victim:
            return answer_all(rank, indices, write)
        answer_all(rank, indices[:number], write)
        time.sleep(60)
        return None

    return generate


class Forked:
    """Processes that share prompts, without a launcher to watch over them.

    Args:
        paths: the output of each process; one path is everyone's.
        count: of prompts.
        number: of processes.
        generate: called with rank, indices, write.
        settings: of each process.
    """

    def __init__(
        self,
        paths: Path | list[Path],
        count: int,
        number: int,
        generate: Callable[[int, list[int], Any], None] = answer_all,
        settings: Callable[[int], dict[str, Any]] = lambda rank: SETTINGS,
    ) -> None:
        self.paths = paths if isinstance(paths, list) else [paths] * number
        self.logs = [path.with_name(f"log-{rank}") for rank, path in enumerate(self.paths)]
        self._port = free_port()
        self._work = (count, number, generate, settings)
        self.processes = [FORK.Process(target=self._run, args=(rank,)) for rank in range(number)]
        for process in self.processes:
            process.start()

    def _run(self, rank: int) -> None:
        count, number, generate, settings = self._work
        os.environ |= {"WORLD_SIZE": str(number), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        # So that nobody waits for the tests' sake.
        roll_call._BEAT, saving._VISIBLE = 0.1, 0.5
        with open(self.logs[rank], "w", buffering=1) as log:
            run = SavedRun(
                ResultsFile(self.paths[rank]),
                settings(rank),
                count,
                Processes.of_launcher(),
                Console(file=log, width=200),
            )
            try:
                run.run(lambda indices, write: generate(rank, indices, write))
            except Exception as error:
                log.write(f"{type(error).__name__}: {error}")
                raise SystemExit(1) from None

    def wait(self) -> list[int]:
        """Exit codes, negative for signals."""
        until = time.monotonic() + 30
        # Asking reaps the dead, as a launcher does.
        while [process.is_alive() for process in self.processes].count(True):
            time.sleep(0.02)
            if time.monotonic() > until:
                for process in self.processes:
                    process.kill()
                raise AssertionError("a process waits for ever")
        return [process.exitcode for process in self.processes]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_until_written(self, rank: int, rows: int) -> None:
        part = self.paths[rank].with_name(f"{self.paths[rank].name}.part-{rank:03d}")
        until = time.monotonic() + 20
        while not part.exists() or part.read_bytes().count(b"\n") < rows:
            assert time.monotonic() < until
            time.sleep(0.01)

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()
