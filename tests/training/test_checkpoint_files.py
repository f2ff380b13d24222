"""What is written is there whole or not at all, and a full disk is named."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from hf_specdec.training.checkpoint import save_tensors, write_folder, write_whole

FULL = Path("/dev/full")


def no_space(path: Path) -> None:
    """Fails as safetensors does."""
    if not path.is_dir():
        path.touch()
    raise SafetensorError("Error while serializing: I/O error: No space left on device (28)")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_tensors({"step": 1}, path)
    # What is written next goes to a device without space.
    os.symlink(FULL, tmp_path / "checkpoint.tmp")
    with pytest.raises(
        OSError, match=r"checkpoint\.pt could not be written, no space left .* kept"
    ):
        save_tensors({"step": 2, "model": torch.zeros(100_000)}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert torch.load(path) == {"step": 1}


def test_space_that_only_words_tell_of(tmp_path):
    with pytest.raises(OSError, match="no space left .* nothing was there before"):
        write_whole(tmp_path / "best.safetensors", no_space)
    assert not list(tmp_path.iterdir())


def test_other_errors_stay_what_they_are(tmp_path):
    def fail(path: Path) -> None:
        path.touch()
        raise PermissionError(13, "not yours")

    with pytest.raises(PermissionError, match="not yours"):
        write_whole(tmp_path / "file", fail)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    def write(text: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "model").write_text(text)
        (folder / "config").write_text(text)
        if text == "second":
            no_space(folder)

    write_folder(tmp_path, lambda folder: write("first", folder))
    with pytest.raises(OSError, match="no space left .* kept"):
        write_folder(tmp_path, lambda folder: write("second", folder))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config", "model"]
    assert {file.read_text() for file in tmp_path.iterdir()} == {"first"}
    write_folder(tmp_path, lambda folder: write("third", folder))
    assert {file.read_text() for file in tmp_path.iterdir()} == {"third"}
