"""One writer at a time: a lock beside the file that a run writes, or in the folder.

The lock is the operating system's, so it ends with the process that holds it, however that ends:
what a killed run leaves never stands in the way of the next one. Who holds it is written beside,
for the message of whoever comes second.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from filelock import FileLock, Timeout


class WriterLock:
    """A context manager; inside, no other process is.

    Args:
        path: the lock is ``<path>.lock``, and its holder is named in ``<path>.lock.json``.
        what: is written, as the user named it.
        instead: what else than waiting the user could do.
    """

    def __init__(self, path: Path, what: str, instead: str) -> None:
        self._path = path.with_name(f"{path.name}.lock")
        self.holder_path = path.with_name(f"{path.name}.lock.json")
        self._what = what
        self._instead = instead
        self._lock = FileLock(str(self._path))

    def acquire(self) -> None:
        """Take it, as entering does.

        Raises:
            ValueError: another process holds it; the message says which.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(self._refusal()) from None
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            # Tells this run from one that left its files here.
            "run": uuid4().hex,
        }
        self.holder_path.write_text(json.dumps(holder) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Let it go, and leave nothing behind."""
        self.holder_path.unlink(missing_ok=True)
        # Before it is let go, as whoever opened the file meanwhile finds it unlinked and tries
        # again. On Windows an open file stays.
        with suppress(OSError):
            self._path.unlink()
        self._lock.release()

    def __enter__(self) -> WriterLock:
        self.acquire()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _refusal(self) -> str:
        try:
            holder = json.loads(self.holder_path.read_text(encoding="utf-8"))
            who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            # It has not written its name yet, or is removing it.
            who = "another process"
        return (
            f"{self._what} is being written by another run ({who}). Wait until that has ended or "
            f"stop it, then run this again; or {self._instead}"
        )
