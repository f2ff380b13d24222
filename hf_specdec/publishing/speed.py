"""What a benchmark measured: the files of ``hf-specdec bench --json``, and of the script before it.

Boundary: files in, checked rows out. Nothing is computed and nothing is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.publishing.measurements import read_json

_IN_BOTH = (
    "batch", "k", "plain_tokens_per_second", "speculative_tokens_per_second",
    "mean_acceptance_length", "per_position",
)  # fmt: skip
# What of a machine a reader wants to know, in this order.
_MACHINE = (
    "gpu",
    "processor",
    "threads",
    "dtype",
    "quantization",
    "torch",
    "transformers",
    "hf_specdec",
)


@dataclass(frozen=True)
class SpeedRow:
    """One line of a benchmark; speeds are tokens per second.

    Attributes:
        prompt_set: its name, ``None`` if there was one alone.
        batch: rows of a batch.
        k: draft tokens a step, or their schedule.
        plain: median without the drafter.
        speculative: median with it.
        speedup: median, least and largest of the pairs of runs.
        mean_acceptance_length: tokens emitted per draft, the target's own included.
        per_position: share of the drafts accepted up to each position.
    """

    prompt_set: str | None
    batch: int
    k: str
    plain: float
    speculative: float
    speedup: tuple[float, float, float]
    mean_acceptance_length: float
    per_position: tuple[float, ...]


@dataclass(frozen=True)
class Speed:
    """A benchmark.

    Attributes:
        rows: its lines.
        machine: what it was measured on, in words.
        content: the file's, to be kept.
    """

    rows: tuple[SpeedRow, ...]
    machine: str
    content: dict[str, Any]


def read_speed(file: Path) -> Speed:
    """Read a benchmark's file.

    A published folder keeps it as ``training/speed.json``.

    Raises:
        ValueError: the file isn't one of a benchmark, is of a synthetic drafter, or says that
            texts were wrong.
    """
    content = read_json(file)
    machine = content.get("environment", content.get("machine"))
    rows = content.get("rows")
    is_right = isinstance(machine, dict) and isinstance(rows, list) and rows
    if not is_right or not all(isinstance(row, dict) and _has_all(row) for row in rows or ()):
        raise ValueError(
            f"speed: {str(file)!r} is no file of hf-specdec bench --json: it must hold "
            f"'environment' and 'rows' with {', '.join(_IN_BOTH)} and the speed-up"
        )
    settings = content.get("settings", {})
    if settings.get("drafter") == "synthetic":
        raise ValueError(
            f"speed: {str(file)!r} was measured with a synthetic drafter, which says nothing of "
            "this one; run hf-specdec bench with --spec-model"
        )
    assert isinstance(machine, dict) and isinstance(rows, list)
    if wrong := sum(row.get("wrong", row.get("texts_wrong", 0)) for row in rows):
        raise ValueError(
            f"speed: {str(file)!r} says that {wrong} texts were not the target's own; that is an "
            "error to be found before publishing"
        )
    words = [f"{name} {machine[name]}" for name in _MACHINE if machine.get(name)]
    tokens = settings.get("max_new_tokens", machine.get("new_tokens"))
    words += [f"{tokens} new tokens"] * bool(tokens)
    if packed := settings.get("pack_weights"):
        # Part of the speed-up is then not the drafter's.
        words.append(f"pack_weights {packed}")
    return Speed(tuple(_row(row) for row in rows), ", ".join(words), content)


def _has_all(row: dict[str, Any]) -> bool:
    has_speedup = isinstance(row.get("speedup"), dict) or "speedup_median" in row
    return has_speedup and all(name in row for name in _IN_BOTH)


def _row(row: dict[str, Any]) -> SpeedRow:
    ratios = row.get("speedup") or {
        name: row[f"speedup_{name}"] for name in ("median", "min", "max")
    }
    schedule = row.get("schedule")
    return SpeedRow(
        prompt_set=row.get("prompt_set"),
        batch=row["batch"],
        k=str(row["k"] if schedule is None else schedule),
        plain=row["plain_tokens_per_second"],
        speculative=row["speculative_tokens_per_second"],
        speedup=(ratios["median"], ratios["min"], ratios["max"]),
        mean_acceptance_length=row["mean_acceptance_length"],
        per_position=tuple(row["per_position"]),
    )
