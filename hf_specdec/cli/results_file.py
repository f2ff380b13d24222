"""A JSONL file of results that an interrupted run continues, written by one process or several.

Beside ``out.jsonl`` lies ``out.jsonl.settings.json``, which says what the rows were made with.
Under several processes each one appends to a part of its own, ``out.jsonl.part-000`` and so on;
the main process joins them in order. A row's ``index`` says where it belongs. While a process
writes, it holds a lock (`WriterLock`): the main one on the file, each other one on its part.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from hf_specdec.modeling.checkpoint_headers import read_json
from hf_specdec.writer_lock import WriterLock


class WriteRow(Protocol):
    """Appends one row and hands it to the operating system."""

    def __call__(self, row: dict[str, Any]) -> None: ...


class ResultsFile:
    """Rows of results in a file.

    Args:
        path: of the JSONL file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._settings_path = path.with_name(f"{path.name}.settings.json")

    def lock(self, part: int | None = None) -> WriterLock:
        """What this process holds while it writes, so that no other run writes the same.

        Args:
            part: the process's number, under several.

        Raises:
            ValueError: there is no folder for the file.
        """
        if not self.path.parent.is_dir():
            raise ValueError(f"--output {self.path}: there is no folder {self.path.parent}")
        # Process 0 holds the file itself.
        path = self._part(part) if part else self.path
        return WriterLock(path, f"--output {path}", "name another --output")

    def prepare(self, settings: dict[str, Any], overwrite: bool = False) -> None:
        """Begin or continue; for the process that holds the lock.

        What an interrupted run left is put in order: half-written lines are dropped, parts joined.

        Args:
            settings: what rows are made with, for JSON.
            overwrite: begin anew, whatever is there.

        Raises:
            ValueError: rows that were made with other settings, or by another program; a part that
                a process of an earlier run still writes.
        """
        for number in self._locked_parts():
            with self.lock(number):
                pass  # its process has ended
        if overwrite:
            for path in [self.path, *self._parts()]:
                path.unlink(missing_ok=True)
        elif self.path.exists() or self._parts():
            self.check(settings)
        _replace(self._settings_path, json.dumps(settings, indent=2) + "\n")
        self.join()

    def finished(self, parts: bool = False) -> set[int]:
        """Indices of the rows that are there.

        Args:
            parts: those in parts that aren't joined as well.
        """
        paths = [self.path, *(self._parts() if parts else ())]
        return {index for path in paths for index, _ in _rows(path)}

    def fingerprint(self) -> str:
        """Of the file as it was prepared by the run that holds it.

        A process on another machine that finds another one doesn't look at the same folder.
        """
        digest = hashlib.sha256()
        for path in (self.lock().holder_path, self._settings_path, self.path):
            digest.update(path.read_bytes() if path.exists() else b"")
            digest.update(b"|")
        return digest.hexdigest()

    @contextmanager
    def append(self, part: int | None = None) -> Iterator[WriteRow]:
        """Write rows behind those that are there; before the first one no file is made.

        Args:
            part: the process's number, under several.
        """
        path = self.path if part is None else self._part(part)
        with ExitStack() as stack:
            files: list[TextIO] = []

            def write(row: dict[str, Any]) -> None:
                if not files:
                    files.append(stack.enter_context(open(path, "a", encoding="utf-8")))
                files[0].write(json.dumps(row, ensure_ascii=False) + "\n")
                files[0].flush()

            yield write

    def join(self) -> None:
        """Bring all rows into the file, in order, each once."""
        parts = self._parts()
        found = [(path, list(_rows(path))) for path in (self.path, *parts)]
        rows: dict[int, str] = {}
        for _, lines in found:
            for index, line in lines:
                rows.setdefault(index, line)
        text = "".join(rows[index] + "\n" for index in sorted(rows))
        present = self.path.read_bytes() if self.path.exists() else b""
        if present != text.encode():
            _replace(self.path, text)
        for path in parts:
            path.unlink()

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.part-{number:03d}")

    def _parts(self) -> list[Path]:
        return self._numbered("")

    def _locked_parts(self) -> list[int]:
        """Parts whose process holds them, or died."""
        return [int(p.name.split("-")[-1].split(".")[0]) for p in self._numbered(r"\.lock")]

    def _numbered(self, ending: str) -> list[Path]:
        pattern = re.compile(rf"{re.escape(self.path.name)}\.part-\d+{ending}")
        return sorted(p for p in self.path.parent.iterdir() if pattern.fullmatch(p.name))

    def check(self, settings: dict[str, Any]) -> None:
        """Raise ValueError unless the rows were made with these settings."""
        ways = "Continue with the same settings, name another --output, or add --overwrite"
        if not self._settings_path.exists():
            raise ValueError(
                f"--output {self.path} exists, but not {self._settings_path.name}, which would say "
                f"how it was made. {ways}"
            )
        before = read_json(self._settings_path)
        now = json.loads(json.dumps(settings))
        other = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if other:
            differences = "; ".join(f"{n}: {before.get(n)!r}, now {now.get(n)!r}" for n in other)
            raise ValueError(
                f"--output {self.path} has rows made with other settings ({differences}). {ways}"
            )


def _rows(path: Path) -> Iterable[tuple[int, str]]:
    """Index and text of every complete row.

    Raises:
        ValueError: a complete line that isn't a row.
    """
    if not path.exists():
        return
    # A last line without its end was being written when the run was interrupted.
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
            index = json.loads(text)["index"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}, line {number} is not a row of results; move the file away"
            ) from None
        yield index, text


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: whoever reads it sees the old text or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
