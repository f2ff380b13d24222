"""Checkpoints to convert."""

from pathlib import Path

import pytest
import torch


@pytest.fixture
def save(make_speculator, tmp_path: Path):
    """``save(**config)``: a speculator's folder, and the speculator."""

    def make(dtype=torch.float32, **fields):
        model = make_speculator(**fields).to(dtype)
        folder = tmp_path / "source"
        model.save_pretrained(folder)
        return folder, model

    return make
