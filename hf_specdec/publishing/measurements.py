"""The numbers a model card may show: read from files that measured them, or left out.

Boundary: files in, checked dictionaries out. Nothing is computed and nothing is assumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULT_FILE = Path("training") / "result.json"
SPEED_FILE = Path("training") / "speed.json"
CURVE_FILE = Path("training") / "curve.png"
_FORMAT_VERSION = 1
_SPEED_ROW = (
    "batch", "k", "plain_tokens_per_second", "speculative_tokens_per_second", "speedup_median",
    "speedup_min", "speedup_max", "mean_acceptance_length", "per_position",
)  # fmt: skip


def read_result(folder: Path) -> dict[str, Any] | None:
    """What ``training/result.json`` of a drafter's folder says; ``None`` where there is none.

    Raises:
        ValueError: the file is damaged, or of a format that this version doesn't know.
    """
    file = folder / RESULT_FILE
    if not file.is_file():
        return None
    result = _json(file)
    if result.get("format_version") != _FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version={result.get('format_version')!r}, this hf_specdec reads "
            f"{_FORMAT_VERSION}"
        )
    return result


def read_speed(file: Path) -> dict[str, Any]:
    """What ``benchmarks/throughput.py --json`` wrote: ``machine`` and ``rows``.

    A published folder keeps it as ``training/speed.json``.

    Raises:
        ValueError: the file isn't one of its.
    """
    speed = _json(file)
    rows = speed.get("rows")
    has_rows = isinstance(rows, list) and all(set(_SPEED_ROW) <= set(row) for row in rows)
    if not isinstance(speed.get("machine"), dict) or not rows or not has_rows:
        raise ValueError(
            f"speed: {str(file)!r} is no file of benchmarks/throughput.py --json: it must hold "
            f"'machine' and 'rows' with {', '.join(_SPEED_ROW)}"
        )
    return speed


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object")
    return content
