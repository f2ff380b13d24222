"""Where a drafter's folder keeps what was measured, and what training measured.

Boundary: files in, dictionaries out. A number that isn't there is left out of the card.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

RESULT_FILE = Path("training") / "result.json"
SPEED_FILE = Path("training") / "speed.json"
CURVE_FILE = Path("training") / "curve.png"
_FORMAT_VERSION = 1


def read_result(folder: Path) -> dict[str, Any] | None:
    """What ``training/result.json`` of a drafter's folder says; ``None`` where there is none.

    Without names of folders, see `last_parts`.

    Raises:
        ValueError: the file is damaged, or of a format that this version doesn't know.
    """
    file = folder / RESULT_FILE
    if not file.is_file():
        return None
    result = read_json(file)
    if result.get("format_version") != _FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version={result.get('format_version')!r}, this hf_specdec reads "
            f"{_FORMAT_VERSION}"
        )
    return last_parts(result)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def last_parts(value: Any) -> Any:
    """A content with the last part alone of every text that is an absolute path.

    Where somebody's folders are is nobody's business.
    """
    if isinstance(value, dict):
        return {name: last_parts(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [last_parts(entry) for entry in value]
    if not isinstance(value, str) or "\n" in value:
        return value
    for path in (PurePosixPath(value), PureWindowsPath(value)):
        if path.is_absolute() or value.startswith("~"):
            return path.name
    return value
