"""The log of a run, ``training/log.jsonl``: one JSON object for every evaluation.

Boundary: lines of a file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_specdec.training.checkpoint import write_whole

LOG_FILE = Path("training", "log.jsonl")


class TrainingLog:
    """Entries of one run.

    Args:
        directory: the drafter's folder.
        writes: whether this process writes; others keep silent.
    """

    def __init__(self, directory: Path, writes: bool = True) -> None:
        self._path = directory / LOG_FILE
        self._writes = writes

    def clear(self) -> None:
        """Begin anew."""
        if self._writes:
            self._path.unlink(missing_ok=True)

    def add(self, **values: Any) -> None:
        """Append an entry; ``step`` must be among the values."""
        if self._writes:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

    def forget_after(self, step: int) -> None:
        """Remove the entries of later steps, and a line that was cut short."""
        if not self._writes:
            return
        kept = [entry for entry in read_log(self._path) if entry["step"] <= step]
        text = "".join(f"{json.dumps(entry)}\n" for entry in kept)
        write_whole(self._path, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_log(path: Path) -> list[dict[str, Any]]:
    """All entries; the last one is left out if a run was killed while it was written."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries
