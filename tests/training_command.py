"""A tiny target on disk, and `hf-specdec train` run on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_specdec.cli.app import app

# A run of a second or two on the tiny target.
SMALL = [
    *("--dtype", "float32", "--precision", "fp32", "--device", "cpu", "--rows", "8"),
    *("--tokens", "3000", "--batch-size", "64", "--steps", "30", "--heads", "2"),
    *("--answer-tokens", "40", "--held-out-every", "4"),
    *("--inner-dim", "24", "--evaluate-every", "10", "--checkpoint-every", "5"),
]


@pytest.fixture
def target_folder(target, tokenizer, tmp_path: Path) -> str:
    """The tiny Llama with its tokenizer, as `save_pretrained` writes them."""
    folder = tmp_path / "target"
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def train_as_given(target_folder) -> Callable[..., Result]:
    """``train_as_given("--out", ..)``: the command on the tiny target."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["train", target_folder, *map(str, arguments)])

    return run


@pytest.fixture
def train(train_as_given) -> Callable[..., Result]:
    """``train("--out", ..)``: the same with small numbers; what is given counts more."""
    return lambda *arguments: train_as_given(*SMALL, *arguments)


def jsonl(path: Path, rows: list[dict]) -> str:
    """Write rows as JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(first: int, count: int) -> str:
    """Words of the tiny tokenizer."""
    return " ".join(f"w{(first + i) % 50}" for i in range(count))
