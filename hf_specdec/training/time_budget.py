"""How much time a run has, and how it was spent, over interruptions.

Boundary: seconds, and one small file. What the time buys is decided by those who spend it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_specdec.modeling.checkpoint_headers import read_json
from hf_specdec.training.checkpoint import write_whole

_FILE = "plan.json"
_WRITE_EVERY = 10.0


class RunPlan:
    """What a run has decided and spent, kept in ``training/plan.json`` of its folder.

    Args:
        directory: the drafter's folder.
        minutes: the budget, ``None`` for no limit.
        writes: whether this process writes the file.
        started: when the run began, a time of ``time.monotonic()``; ``None``: now.

    Attributes:
        seconds: spent so far on ``"generation"`` and ``"training"``, interrupted runs included.
        decided: what an earlier start has decided, by name; fit for JSON.
        minutes: see Args.

    Raises:
        ValueError: ``minutes`` is not positive.
    """

    def __init__(
        self,
        directory: str | Path,
        minutes: float | None = None,
        writes: bool = True,
        started: float | None = None,
    ) -> None:
        if minutes is not None and minutes <= 0:
            raise ValueError(f"time_budget={minutes} must be a positive number of minutes")
        self._path = Path(directory) / "training" / _FILE
        self._writes = writes
        self.minutes = minutes
        self.seconds: dict[str, float] = {"generation": 0.0, "training": 0.0}
        self.decided: dict[str, Any] = {}
        self._started = time.monotonic() if started is None else started
        self._before = 0.0
        self._written = self._started
        if self._path.exists():
            values = read_json(self._path)
            if missing := sorted({"seconds", "decided", "total"} - set(values)):
                raise ValueError(f"{self._path} is damaged: it lacks {missing}; remove it")
            self.seconds, self.decided = values["seconds"], values["decided"]
            self._before = values["total"]

    @property
    def total_seconds(self) -> float:
        """Seconds since the run was first started, without the pauses."""
        return self._before + time.monotonic() - self._started

    def end(self, share: float = 1.0) -> float | None:
        """When a share of the budget is used up, a time of ``time.monotonic()``."""
        if self.minutes is None:
            return None
        return time.monotonic() + share * self.minutes * 60 - self.total_seconds

    def check(self, about: dict[str, Any]) -> None:
        """Refuse to go on with another run than the one that was decided on as ``about``.

        Raises:
            ValueError: the folder holds a run about something else; the message names it.
        """
        noted = self.decided.get("about", {})
        wanted = json.loads(json.dumps(about))
        different = [key for key in wanted if key in noted and wanted[key] != noted[key]]
        if different:
            listed = ", ".join(f"{k}={noted[k]!r}, not {wanted[k]!r}" for k in different)
            raise ValueError(
                f"out={str(self._path.parent.parent)!r} holds a run that was begun with {listed}; "
                "go on with the same, or name another folder"
            )

    def decide(self, **values: Any) -> None:
        """Keep decisions for the next start."""
        self.decided.update(values)
        self.write()

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Count the time of the block as spent on ``what``."""
        started, before = time.monotonic(), self.seconds[what]
        self._spend = (what, started, before)
        try:
            yield
        finally:
            self.seconds[what] = before + time.monotonic() - started
            del self._spend
            self.write()

    def tick(self) -> None:
        """Write the file now and then, so that a run that is killed loses little of the count."""
        now = time.monotonic()
        if now - self._written < _WRITE_EVERY:
            return
        what, started, before = self._spend
        self.seconds[what] = before + now - started
        self.write()

    def write(self) -> None:
        """Write the file."""
        self._written = time.monotonic()
        if not self._writes:
            return
        values = {"total": self.total_seconds, "seconds": self.seconds, "decided": self.decided}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, lambda path: _write_json(path, values))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
