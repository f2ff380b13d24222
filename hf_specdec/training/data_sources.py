"""Rows of text, prompts or conversations, read with the library ``datasets``.

A source is local files (text, JSON lines, CSV, Parquet, Arrow), a folder of such files, or the id
of a data set on the Hub, ``owner/name`` or ``owner/name:configuration``. What a row holds is told
by its columns:

    messages    a conversation, a list of {"role": .., "content": ..}
    prompt      a request, which becomes a user's turn
    text        a text

Boundary: names in, Python values out. What becomes of them is `prompt_data`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

RowKind = Literal["messages", "prompt", "text"]

# In this order: a data set with conversations often has their prompt as a column, too.
_USUAL_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question", "query"),
    "text": ("text", "content", "document"),
}
_LOADERS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


@dataclass(frozen=True)
class DataChoice:
    """Which data, and where in it.

    Attributes:
        sources: files, folders, or ids of data sets on the Hub.
        split: of a data set on the Hub.
        column: where the text, the prompt or the conversation is; ``None`` looks for the usual
            names.
        kind: what ``column`` holds; ``None`` tells it from the name of the column.
    """

    sources: tuple[str, ...]
    split: str = "train"
    column: str | None = None
    kind: RowKind | None = None

    @property
    def files(self) -> list[str]:
        """Names of local files and folders, without the folders they are in."""
        return [Path(source).name for source in self.sources if Path(source).exists()]

    @property
    def datasets(self) -> list[str]:
        """Ids of data sets on the Hub."""
        names = [source for source in self.sources if not Path(source).exists()]
        return [name.partition(":")[0] for name in names]


@dataclass
class Rows:
    """Values of one column of all sources, in their order.

    Attributes:
        kind: what they are.
        column: where they were found.
        skipped: rows so far that held nothing, counted while they are read.
    """

    kind: RowKind
    column: str
    _examples: Iterator[dict[str, Any]] = field(repr=False)
    skipped: int = 0

    def __iter__(self) -> Iterator[Any]:
        """Texts and prompts as ``str``, conversations as lists of messages; none is empty.

        Raises:
            ValueError: no row holds anything, or a row holds something else.
        """
        found = 0
        for number, example in enumerate(self._examples):
            value = example.get(self.column)
            if not value or (isinstance(value, str) and not value.strip()):
                self.skipped += 1
                continue
            found += 1
            yield self._checked(value, number)
        if not found:
            raise ValueError(
                f"the data has no text: column {self.column!r} is empty in all {self.skipped} rows"
            )

    def _checked(self, value: Any, number: int) -> Any:
        if self.kind != "messages":
            if isinstance(value, str):
                return value.strip("\n")
            raise ValueError(
                f"row {number}, column {self.column!r} is {type(value).__name__}, but a {self.kind}"
                " is a string; name another column, or say that it holds messages"
            )
        if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
            turns = [_turn(turn) for turn in value]
            if all(turn is not None for turn in turns):
                return turns
        raise ValueError(
            f"row {number}, column {self.column!r} holds no conversation: that is a list of "
            '{"role": .., "content": ..}'
        )


def open_rows(choice: DataChoice) -> Rows:
    """Open the sources and find the column.

    Raises:
        ImportError: the library ``datasets`` is not installed.
        FileNotFoundError: a source that is neither a file nor looks like an id.
        ValueError: a kind of file that can't be read, no rows, or no such column; the message
            names the columns there are.
    """
    examples = chain.from_iterable(_examples(source, choice) for source in choice.sources)
    first = next(examples, None)
    if first is None:
        raise ValueError(f"data={', '.join(choice.sources)} has no rows, so there is no text")
    kind, column = _find_column(choice, list(first))
    return Rows(kind, column, chain([first], examples))


def _examples(source: str, choice: DataChoice) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ImportError(
            'reading data sets needs the library datasets: pip install "hf-specdec[train]"'
        ) from error
    path = Path(source)
    if path.exists():
        files = _files_of(path)
        loader = _LOADERS[files[0].suffix.lower()]
        options: dict[str, Any] = {}
        if loader == "text":
            # Prompts stand one a line; texts are longer than a line.
            options["sample_by"] = "line" if choice.kind == "prompt" else "paragraph"
        yield from load_dataset(
            loader, data_files=[str(file) for file in files], split="train", streaming=True,
            **options,
        )  # fmt: skip
        return
    name, _, configuration = source.partition(":")
    if "/" not in name or name.startswith((".", "/", "~")) or Path(name).suffix in _LOADERS:
        raise FileNotFoundError(
            f"data={source!r} is neither a file or folder here nor the id of a data set on the "
            "Hub (owner/name)"
        )
    yield from load_dataset(name, configuration or None, split=choice.split, streaming=True)


def _files_of(path: Path) -> list[Path]:
    """The files to read for a file or folder: all of one type."""
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix.lower() in _LOADERS)
    known = ", ".join(_LOADERS)
    if not files:
        raise ValueError(f"data={str(path)!r} is a folder without a file of {known}")
    loaders = {_LOADERS.get(file.suffix.lower()) for file in files}
    if None in loaders:
        raise ValueError(f"data={str(path)!r} can't be read; its name must end in {known}")
    if len(loaders) > 1:
        raise ValueError(
            f"data={str(path)!r} mixes files of several types; name those to read one by one"
        )
    return files


def _find_column(choice: DataChoice, present: Sequence[str]) -> tuple[RowKind, str]:
    listed = ", ".join(present)
    if choice.column is not None:
        if choice.column not in present:
            raise ValueError(f"the data has no column {choice.column!r}; it has {listed}")
        usual = [kind for kind, names in _USUAL_COLUMNS.items() if choice.column in names]
        return choice.kind or (usual[0] if usual else "text"), choice.column
    for kind, names in _USUAL_COLUMNS.items():
        if choice.kind == "prompt" and kind == "text" or choice.kind in (None, kind):
            for name in names:
                if name in present:
                    return choice.kind or kind, name
    wanted = "text, prompts or messages" if choice.kind is None else choice.kind
    raise ValueError(f"none of the data's columns is known to hold {wanted}; name one of {listed}")


def _turn(turn: dict[str, Any]) -> dict[str, str] | None:
    """A message; the names of ShareGPT's files are understood, too."""
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}
