"""Folders read and written: what doesn't fit together is refused, nothing dropped unsaid."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec.conversion import convert


def split(folder: Path, names: list[str], index: dict[str, str] | None = None) -> None:
    """Two shards in place of ``model.safetensors``; both have ``names``."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = list(tensors)[: len(tensors) // 2]
    for file, has in (("a", half), ("b", [n for n in tensors if n not in half])):
        shard = {name: tensors[name] for name in {*has, *names}}
        save_file(shard, folder / f"{file}.safetensors", {"format": "pt"})
    weight_map = {name: "a.safetensors" if name in half else "b.safetensors" for name in tensors}
    content = {"weight_map": weight_map | (index or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_tensor_in_two_shards(save, tmp_path: Path) -> None:
    folder, _ = save()
    split(folder, ["speculator.ln.0.bias"])
    message = r"has \['speculator.ln.0.bias'\] twice, the second in b.safetensors"
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "new")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "run.py"])
def test_index_does_not_lead_out_of_the_folder(save, tmp_path: Path, name: str) -> None:
    folder, _ = save()
    (tmp_path / "other").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "other" / "model.safetensors")
    split(folder, [], {"x": name})
    with pytest.raises(ValueError, match=f"^SOURCE.* names '{name}' .* in the same folder"):
        convert(folder, tmp_path / "new")


def test_weights_that_are_not_read_are_said(save, tmp_path: Path) -> None:
    folder, _ = save()
    save_file({"x": torch.ones(1)}, folder / "extra.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    notes = convert(folder, tmp_path / "new").notes
    for name in ("extra.safetensors", "pytorch_model.bin"):
        assert f"beside the weights, not carried over: {name}" in notes


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json can't be read as JSON"),
        ("config.json", "[]", "config.json holds a list, it must be"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
    ],
)
def test_damaged_json(save, tmp_path: Path, file: str, content: str, message: str) -> None:
    folder, _ = save()
    split(folder, [])
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "new")


@pytest.mark.parametrize(
    ("content", "message"), [([torch.ones(1)], "holds a list, no dict"), ({"x": 1}, "no tensors")]
)
def test_bin_of_something_else(save, tmp_path: Path, content, message: str) -> None:
    folder, _ = save()
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "new")


def test_destination_that_appears_meanwhile_stays(save, tmp_path: Path) -> None:
    folder, _ = save()
    new = tmp_path / "new"

    def advance(amount: int, name: str) -> None:
        new.mkdir(exist_ok=True)
        (new / "mine.txt").write_text("mine")

    with pytest.raises(ValueError, match="appeared while it was written"):
        convert(folder, new, advance=advance)
    assert [path.name for path in new.iterdir()] == ["mine.txt"]
    assert not list(tmp_path.glob(".new*"))
