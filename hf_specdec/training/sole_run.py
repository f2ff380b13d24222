"""One run a folder: two with the same ``out`` would take each other's checkpoints for their own.

Boundary: the lock on the drafter's folder; a corpus has its own, as runs may share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_specdec.training.parallel import Processes
from hf_specdec.writer_lock import WriterLock


@contextmanager
def sole_run(out: Path, processes: Processes) -> Iterator[None]:
    """Let no other run train into a folder inside the block.

    The main process holds the lock, for all that train together.

    Args:
        out: the drafter's folder; made if it is missing, and removed again if it stays empty.
        processes: of this run; all of them enter.

    Raises:
        ValueError: another run is training there; raised by every process.
    """
    folder = out / "training"
    lock = WriterLock(folder / "run", f"out={str(out)!r}", "name another folder (--out)")
    made: list[Path] = []
    refusal = None
    if processes.is_main:
        made = [path for path in (folder, out) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except ValueError as error:
            refusal = str(error)
    refusal = processes.from_main(refusal)
    if refusal is not None:
        raise ValueError(refusal)
    try:
        yield
    finally:
        if processes.is_main:
            lock.release()
            for path in made:
                # Not empty as soon as anything was written.
                with suppress(OSError):
                    path.rmdir()
