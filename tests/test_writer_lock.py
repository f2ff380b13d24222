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
