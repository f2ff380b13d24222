"""Prompts that users give: as arguments, a line each, or in a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

Messages = list[dict[str, Any]]
DEFAULT_FIELDS = ("messages", "prompt")


@dataclass(frozen=True)
class PromptItem:
    """One prompt.

    Attributes:
        index: its place among all prompts, from 0.
        prompt: text, or chat messages (``[{"role": ..., "content": ...}, ...]``).
        seed: of its own; ``None`` where the run's counts.
    """

    index: int
    prompt: str | Messages
    seed: int | None = None


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt a line, empty lines left out.

    Raises:
        typer.BadParameter: there is none.
    """
    prompts = split_lines(path.read_text(encoding="utf-8"))
    if not prompts:
        raise typer.BadParameter(
            f"{path} has no prompt in it; write one a line", param_hint="--prompts"
        )
    return prompts


def split_lines(text: str) -> tuple[str, ...]:
    """The lines that aren't empty.

    Other separators that ``str.splitlines`` knows, such as a form feed, are a part of a prompt.
    """
    return tuple(line for line in (line.strip() for line in text.split("\n")) if line)


def items_of(prompts: Sequence[str]) -> list[PromptItem]:
    """Prompts that are texts.

    Raises:
        typer.BadParameter: bytes that are no UTF-8, as a shell can pass them.
    """
    for number, prompt in enumerate(prompts, start=1):
        if not _is_unicode(prompt):
            raise typer.BadParameter(
                f"argument {number} ({prompt!r}) is not text in UTF-8", param_hint="PROMPT"
            )
    return [PromptItem(index, prompt) for index, prompt in enumerate(prompts)]


def read_items(lines: Iterable[str], name: str, field: str | None = None) -> list[PromptItem]:
    """The prompts of a JSONL file, one object a line.

    Args:
        lines: of the file; empty ones are left out.
        name: of the file, for messages.
        field: the prompt's; by default ``messages`` or ``prompt``. An integer ``seed`` beside it is
            that prompt's.

    Raises:
        typer.BadParameter: a line that isn't such an object, or no line at all.
    """
    items: list[PromptItem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong_line(name, number, f"is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise _wrong_line(name, number, f"is a {type(row).__name__}, not an object")
        key = next((key for key in ([field] if field else DEFAULT_FIELDS) if key in row), None)
        if key is None:
            wanted = repr(field) if field else "'prompt' or 'messages'"
            raise _wrong_line(
                name, number, f"has no field {wanted} but {sorted(row)}; name it with --field"
            )
        seed = row.get("seed")
        is_seed = seed is None or (type(seed) is int and -(2**63) <= seed < 2**63)
        if not (_is_text_or_messages(row[key]) and is_seed):
            raise _wrong_line(
                name,
                number,
                f"must have in {key!r} a text, or messages with role and content, and as seed, if "
                "it has one, an integer of 64 bits",
            )
        if not _is_unicode(row[key]):
            raise _wrong_line(name, number, f"has half a surrogate pair in {key!r}")
        items.append(PromptItem(len(items), row[key], seed))
    if not items:
        raise typer.BadParameter(f"{name} has no prompt in it", param_hint="--input")
    return items


def _is_text_or_messages(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def _is_unicode(value: Any) -> bool:
    """Whether a tokenizer takes it; JSON may have ``"\\ud800"``, which no text in UTF-8 has."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong_line(name: str, number: int, what: str) -> typer.BadParameter:
    return typer.BadParameter(f"{name}, line {number} {what}", param_hint="--input")
