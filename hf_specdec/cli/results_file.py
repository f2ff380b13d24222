"""A JSONL file of results that an interrupted run continues, written by one process or several.

Beside ``out.jsonl`` lies ``out.jsonl.settings.json``, which says what the rows were made with.
Under several processes each one appends to a part of its own, ``out.jsonl.part-000`` and so on;
the main process joins them in order. A row's ``index`` says where it belongs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hf_specdec.modeling.checkpoint_headers import read_json


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

    def prepare(self, settings: dict[str, Any], overwrite: bool = False) -> None:
        """Begin or continue; only one process may do so at a time.

        What an interrupted run left is put in order: half-written lines are dropped, parts joined.

        Args:
            settings: what rows are made with, for JSON.
            overwrite: begin anew, whatever is there.

        Raises:
            ValueError: rows that were made with other settings, or by another program.
        """
        if not self.path.parent.is_dir():
            raise ValueError(f"--output {self.path}: there is no folder {self.path.parent}")
        if overwrite:
            for path in [self.path, *self._parts()]:
                path.unlink(missing_ok=True)
        elif self.path.exists() or self._parts():
            self._check(settings)
        _replace(self._settings_path, json.dumps(settings, indent=2) + "\n")
        self.join()

    def finished(self) -> set[int]:
        """Indices of the rows that are there."""
        return {index for index, _ in _rows(self.path)}

    @contextmanager
    def append(self, part: int | None = None) -> Iterator[WriteRow]:
        """Write rows behind those that are there.

        Args:
            part: the process's number, under several.
        """
        path = self.path if part is None else self._part(part)
        with open(path, "a", encoding="utf-8") as file:

            def write(row: dict[str, Any]) -> None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()

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
        prefix = f"{self.path.name}.part-"
        return sorted(p for p in self.path.parent.iterdir() if p.name.startswith(prefix))

    def _check(self, settings: dict[str, Any]) -> None:
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
