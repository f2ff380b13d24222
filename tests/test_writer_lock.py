"""Two runs never write the same; what a dead one leaves stands in nobody's way."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.training.corpus import CorpusWriter
from hf_specdec.training.corpus_metadata import CorpusMetadata
from hf_specdec.training.parallel import Processes
from hf_specdec.training.sole_run import sole_run
from hf_specdec.writer_lock import WriterLock

METADATA = CorpusMetadata("t", 1, 64, 2, "self_generated")


def make(folder: Path) -> WriterLock:
    return WriterLock(folder / "x.jsonl", "--output x.jsonl", "name another --output")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_holder_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with make(tmp_path) as lock:
        assert names(tmp_path) == ["x.jsonl.lock", "x.jsonl.lock.json"]
        since = json.loads(lock.holder_path.read_text())["since"]
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        message = (
            f"--output x.jsonl is being written by another run ({holder}). Wait until that has "
            "ended or stop it, then run this again; or name another --output"
        )
        with pytest.raises(ValueError) as caught, make(tmp_path):
            pass
        assert str(caught.value) == message
        # The one that was refused has taken nothing with it.
        assert names(tmp_path) == ["x.jsonl.lock", "x.jsonl.lock.json"]
    assert names(tmp_path) == []
    with make(tmp_path):
        pass


def test_a_holder_that_has_no_name_yet(tmp_path: Path) -> None:
    with make(tmp_path) as lock:
        for text in ("", "[]", '{"pid": 3}'):
            lock.holder_path.write_text(text)
            with pytest.raises(ValueError, match=r"another run \(another process\)"):
                make(tmp_path).acquire()


@pytest.mark.skipif(sys.platform == "win32", reason="a process is forked and killed")
def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    def hold() -> None:
        with make(tmp_path):
            time.sleep(60)

    fork: Any = multiprocessing.get_context("fork")
    process = fork.Process(target=hold)
    process.start()
    until = time.monotonic() + 20
    while not (tmp_path / "x.jsonl.lock.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="being written by another run"):
        make(tmp_path).acquire()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert names(tmp_path) == ["x.jsonl.lock", "x.jsonl.lock.json"]
    with make(tmp_path) as lock:
        assert json.loads(lock.holder_path.read_text())["pid"] == os.getpid()
    assert names(tmp_path) == []


def test_a_drafters_folder_has_one_run(tmp_path: Path) -> None:
    out, alone = tmp_path / "folders" / "out", Processes("cpu")
    with sole_run(out, alone):
        assert names(out / "training") == ["run.lock", "run.lock.json"]
        refusal = r"out='.*out' is being written by another run \(process .*\(--out\)"
        with pytest.raises(ValueError, match=refusal), sole_run(out, alone):
            pass
        # Which took nothing with it.
        assert names(out / "training") == ["run.lock", "run.lock.json"]
    # A run that wrote nothing leaves nothing.
    assert not out.exists()
    with sole_run(out, alone):
        (out / "training" / "log.jsonl").touch()
    assert names(out / "training") == ["log.jsonl"]
    (out / "training" / "log.jsonl").unlink()
    with pytest.raises(KeyboardInterrupt), sole_run(out, alone):
        raise KeyboardInterrupt
    # Folders of others stay.
    assert names(out) == ["training"]


def test_every_process_is_told_that_the_folder_is_taken(tmp_path: Path) -> None:
    class Told(Processes):
        """Hears of the main process what it said, or of the refusal that it had."""

        def __init__(self, index: int, said: list[Any]) -> None:
            super().__init__("cpu")
            self.index, self.said = index, said

        def from_main(self, value: Any) -> Any:
            if self.is_main:
                self.said.append(value)
            return self.said[-1]

    said: list[Any] = []
    with sole_run(tmp_path, Told(0, said)), sole_run(tmp_path, Told(1, said)):
        for index in (0, 1):
            with (
                pytest.raises(ValueError, match="being written"),
                sole_run(tmp_path, Told(index, said)),
            ):
                pass


def test_a_corpus_has_one_writer(tmp_path: Path) -> None:
    refusal = r"corpus='.*' is being written by another run \(process"
    with CorpusWriter(tmp_path, METADATA), pytest.raises(ValueError, match=refusal):
        CorpusWriter(tmp_path, METADATA)
    assert names(tmp_path) == ["metadata.json"]
    other = CorpusMetadata("t", 1, 64, 3, "self_generated")
    with pytest.raises(ValueError, match="top_k"):
        CorpusWriter(tmp_path, other)
    # Neither the refusal nor an error keeps the folder from the next.
    with pytest.raises(KeyboardInterrupt), CorpusWriter(tmp_path, METADATA):
        raise KeyboardInterrupt
    with CorpusWriter(tmp_path, METADATA):
        pass
