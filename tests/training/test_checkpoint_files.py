"""What is written is there whole or not at all, and a full disk is named."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.training import StageSettings, Trainer, preset, save_speculator
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


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_run_goes_on_after_the_disk_was_full(markov_corpus, tmp_path):
    corpus = markov_corpus(num_documents=30)
    stage = StageSettings(steps=20, batch_size=32)
    settings = preset(
        "small", distill_top_k=2, precision="fp32", checkpoint_every=5, self_generated=stage
    )

    def trainer(folder: Path) -> Trainer:
        torch.manual_seed(1)
        config = MLPSpeculatorConfig(vocab_size=12, emb_dim=24, inner_dim=16, n_predict=2)
        model = MLPSpeculatorPreTrainedModel(config)
        return Trainer(model, settings, folder, self_generated=corpus, progress=False)

    def fill_the_disk(step: int) -> None:
        if step == 12:
            os.symlink(FULL, tmp_path / "cut" / "training" / "checkpoint.tmp")

    with pytest.raises(OSError, match=r"checkpoint\.pt could not be written, no space left"):
        trainer(tmp_path / "cut").train(on_step=fill_the_disk)
    steps: list[int] = []
    resumed, whole = trainer(tmp_path / "cut"), trainer(tmp_path / "whole")
    assert resumed.train(on_step=steps.append) == whole.train()
    assert steps == list(range(11, 21))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


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


def test_the_best_drafter_stays_when_the_next_does_not_fit(make_speculator, tmp_path, monkeypatch):
    save_speculator(make_speculator(seed=1), tmp_path, "float32")
    before = (tmp_path / "model.safetensors").read_bytes()

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        no_space(folder)

    monkeypatch.setattr(MLPSpeculatorPreTrainedModel, "save_pretrained", save)
    with pytest.raises(OSError, match="no space left"):
        save_speculator(make_speculator(seed=2), tmp_path, "float32")
    monkeypatch.undo()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert MLPSpeculatorPreTrainedModel.from_pretrained(tmp_path).config.n_predict == 4
