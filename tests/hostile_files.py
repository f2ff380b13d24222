"""Checkpoints as nobody should hand them out: cut off, contradicting themselves, or with a trap."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Header = dict[str, Any]


class Trap:
    """Unpickled without care it creates a file."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def header_of(file: Path) -> tuple[Header, bytes]:
    """Header and data of a safetensors file."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(
    file: Path, header: Header | str, data: bytes = b"", length: int | None = None
) -> None:
    """Write a safetensors file with any header, and any claim of how long it is."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def change_entry(file: Path, **fields: Any) -> str:
    """Change what a header says of its first tensor, whose name is returned; ``...`` removes."""
    header, data = header_of(file)
    name = next(key for key in header if key != "__metadata__")
    header[name] = {k: v for k, v in {**header[name], **fields}.items() if v is not ...}
    write_header(file, header, data)
    return name


def change_config(folder: Path, **fields: Any) -> None:
    """Change fields of ``config.json``; ``...`` removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def write_index(folder: Path, weight_map: Any) -> None:
    """An index in place of the single file."""
    if (folder / WEIGHTS).exists():
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content))


def as_pickle(folder: Path, content: Any) -> Path:
    """A ``.bin`` with any content in place of the safetensors file."""
    (folder / WEIGHTS).unlink()
    file = folder / "pytorch_model.bin"
    torch.save(content, file)
    return file


def _doubled(file: Path) -> None:
    header, data = header_of(file)
    name = next(key for key in header if key != "__metadata__")
    text = json.dumps(header)
    write_header(file, f"{text[:-1]}, {json.dumps(name)}: {json.dumps(header[name])}}}", data)


def _overlapping(file: Path) -> None:
    header, data = header_of(file)
    last = max((e for e in header.values() if "dtype" in e), key=lambda e: e["data_offsets"])
    last["data_offsets"] = [n - 1 for n in last["data_offsets"]]
    write_header(file, header, data)


def _with_a_gap(file: Path) -> None:
    header, data = header_of(file)
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [n + 8 for n in entry["data_offsets"]]
    write_header(file, header, bytes(8) + data)


def _cut(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda f: f.write_bytes(b""), "is not a safetensors file: it has no header"),
    "cut in the data": (lambda f: _cut(f, 0.9), r"is damaged or cut off: '.*' ends at byte \d+"),
    "cut in the header": (lambda f: _cut(f, 0.01), "cut off: its header should have .* bytes"),
    "more data": (
        lambda f: f.write_bytes(f.read_bytes() + b"more"),
        r"is damaged: its tensors end at byte \d+ of \d+",
    ),
    "a header longer than the world": (
        lambda f: write_header(f, {}, length=2**63 - 1), "it has no header",
    ),
    "a header longer than the file": (
        lambda f: write_header(f, {}, length=10**6), "should have 1000000 bytes",
    ),
    "no JSON": (lambda f: write_header(f, "{'a'"), "its header isn't JSON"),
    "JSON as deep as the sea": (lambda f: write_header(f, "[" * 10**5), "its header isn't JSON"),
    "a list": (lambda f: write_header(f, "[1]"), "its header is no JSON object"),
    "a key twice": (_doubled, "is damaged: its header has '.*' twice"),
    "overlapping": (_overlapping, "is damaged: '.*' overlaps another tensor"),
    "a gap": (_with_a_gap, "is damaged: '.*' has a gap before it"),
    "a negative shape": (lambda f: change_entry(f, shape=[-1, 24]), r"has shape \[-1, 24\]"),
    "a shape of text": (lambda f: change_entry(f, shape="ab"), "has shape 'ab'"),
    "a shape of 10**30": (lambda f: change_entry(f, shape=[10**30]), r"has shape \[1000"),
    "a shape of truth": (lambda f: change_entry(f, shape=[True, 2]), r"has shape \[True, 2\]"),
    "a huge shape": (lambda f: change_entry(f, shape=[2**40, 2**40]), "has dtype F32 and shape"),
    "as many dimensions as stars": (
        lambda f: change_entry(f, shape=[1] * 10**4), r"has shape \[1, 1, .*\.\.\., it must be",
    ),
    "without a shape": (lambda f: change_entry(f, shape=...), "has shape None"),
    "without offsets": (lambda f: change_entry(f, data_offsets=...), "has data_offsets None"),
    "offsets the wrong way": (
        lambda f: change_entry(f, data_offsets=[8, 0]), r"but data_offsets \[8, 0\]",
    ),
    "offsets far outside": (
        lambda f: change_entry(f, data_offsets=[0, 10**12]), r"but data_offsets \[0, 1000000000000",
    ),
    "an unknown dtype": (lambda f: change_entry(f, dtype="X9"), "has dtype 'X9', which isn't one"),
    "a dtype of another kind": (lambda f: change_entry(f, dtype=[1]), r"has dtype \[1\]"),
}  # fmt: skip
"""Of a safetensors file: what is done to it, and what is said of it then."""

INDEXES: dict[str, tuple[Any, str]] = {
    "another folder": (
        {"a": "../other/model.safetensors"},
        r"names '\.\./other/.*same folder",
    ),
    "passwd": ({"a": "../../../../etc/passwd"}, "names '.*etc/passwd' as the file of 'a'"),
    "an absolute path": ({"a": "/etc/passwd.bin"}, "names '/etc/passwd.bin'"),
    "a path of Windows": ({"a": "C:\\model.bin"}, "names 'C:.*model.bin'"),
    "a URL": ({"a": "https://evil.example/model.safetensors"}, "names 'https://evil"),
    "code": ({"a": "model.py"}, "names 'model.py'"),
    "a number": ({"a": 7}, "names 7 as the file of 'a'"),
    "a list": (["model.safetensors"], "has no weight_map"),
    "nothing": ({}, "has no weight_map"),
    "a shard that is gone": ({"a": "model-7.safetensors"}, "model-7.safetensors"),
}
"""Of a checkpoint: a ``weight_map``, and what is said of it."""
