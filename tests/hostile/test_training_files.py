"""Damaged corpora and checkpoints of training runs: named, and nothing in them is run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import DAMAGES, Trap
from safetensors.torch import load_file, save_file

from hf_specdec.training.checkpoint import damage_named, load_run
from hf_specdec.training.corpus import Corpus, CorpusWriter, Document
from hf_specdec.training.corpus_metadata import CorpusMetadata

METADATA = CorpusMetadata("target", 4, 16, 2, "ground_truth")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A small corpus of two documents, to be spoilt."""
    with CorpusWriter(tmp_path / "corpus", METADATA) as writer:
        for i in range(2):
            writer.add(
                Document(
                    i, torch.arange(5), torch.ones(5), torch.randn(5, 4),
                    torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2),
                )
            )  # fmt: skip
    assert len(Corpus(tmp_path / "corpus")) == 10
    return tmp_path / "corpus"


@pytest.mark.parametrize("damage", ["cut in the data", "a key twice", "overlapping", "empty"])
def test_a_damaged_shard(corpus: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    spoil(corpus / "part-0000.safetensors")
    for use in (Corpus, lambda path: CorpusWriter(path, METADATA)):
        with pytest.raises(ValueError, match=f"part-0000.safetensors .*{message}"):
            use(corpus)


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no tokens": (lambda t: t.pop("tokens"), "it lacks tokens"),
    "no offsets": (lambda t: t.pop("offsets"), "it lacks offsets"),
    "floats for tokens": (
        lambda t: t.update(tokens=t["tokens"].float()), r"tokens is F32 \[10\], .*must be I32",
    ),
    "fewer states than tokens": (
        lambda t: t.update(hidden=t["hidden"][:7].clone()), r"hidden is BF16 \[7, 4\]",
    ),
    "states without a width": (
        lambda t: t.update(hidden=t["hidden"][:, 0].clone()), r"hidden is BF16 \[10\]",
    ),
    "ids of another vocabulary": (
        lambda t: t["tokens"].add_(12), r"token ids of 12 to 16, the target's are 0 to 15",
    ),
    "negative ids": (lambda t: t["tokens"].sub_(1), "token ids of -1 to 3"),
    "documents out of order": (
        lambda t: t.update(offsets=torch.tensor([0, 7, 5, 10])), "offsets don't lead from 0 to 10",
    ),
    "documents that end too early": (
        lambda t: t.update(offsets=torch.tensor([0, 5])), "offsets don't lead from 0 to 10",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_of_something_else(corpus: Path, change: str) -> None:
    file = corpus / "part-0000.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    CHANGES[change][0](tensors)
    save_file(tensors, file)
    with pytest.raises(
        ValueError, match=f"part-0000.safetensors is damaged: .*{CHANGES[change][1]}"
    ):
        Corpus(corpus)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "4"}, "hidden_size='4'"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"settings": 3}, "settings=3"),
        ({"more": 1}, "more=1"),
        ({"format_version": 7}, "format_version=7"),
    ],
)
def test_metadata_of_another_kind(corpus: Path, fields: dict[str, Any], message: str) -> None:
    file = corpus / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ValueError, match=f"metadata.json .*{message}"):
        Corpus(corpus)


@pytest.mark.parametrize("content", ["{", "[1]", "", "[" * 10**5])
def test_metadata_that_is_no_object(corpus: Path, content: str) -> None:
    (corpus / "metadata.json").write_text(content)
    with pytest.raises(ValueError, match=r"metadata\.json (can't be read as JSON|holds a list)"):
        Corpus(corpus)


class TestRuns:
    """``training/checkpoint.pt``, from which a run goes on."""

    GOOD: dict[str, Any] = {
        "fingerprint": {"settings": 1}, "step": 3, "model": {}, "optimizer": {}, "best": None,
        "best_step": 0, "evaluations_since_best": 0,
    }  # fmt: skip

    def test_code_is_not_run(self, tmp_path: Path) -> None:
        torch.save({**self.GOOD, "model": Trap(tmp_path / "ran")}, tmp_path / "checkpoint.pt")
        with pytest.raises(ValueError, match=r"checkpoint\.pt is no pickle of tensors alone"):
            load_run(tmp_path / "checkpoint.pt", {"settings": 1})
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([1], "holds a list"),
            ({"step": 1}, "is no checkpoint of a run: it lacks best, best_step"),
            ({**GOOD, "fingerprint": 3}, "is damaged: fingerprint or step"),
            ({**GOOD, "step": "3"}, "is damaged: fingerprint or step"),
            ({**GOOD, "fingerprint": {}}, "was made with other settings"),
        ],
    )
    def test_something_else(self, tmp_path: Path, content: Any, message: str) -> None:
        torch.save(content, tmp_path / "checkpoint.pt")
        with pytest.raises(ValueError, match=message):
            load_run(tmp_path / "checkpoint.pt", {"settings": 1})

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
    def test_a_file_that_is_cut_off(self, tmp_path: Path, share: float) -> None:
        file = tmp_path / "checkpoint.pt"
        torch.save({**self.GOOD, "model": {"w": torch.ones(400)}}, file)
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
        with pytest.raises(ValueError, match=r"checkpoint\.pt can't be read as a torch checkpoint"):
            load_run(file, {"settings": 1})

    def test_weights_that_do_not_fit_are_named_with_their_file(self, tmp_path: Path) -> None:
        layer = torch.nn.Linear(2, 2)
        with (
            pytest.raises(ValueError, match="checkpoint.pt is damaged: .*; call train"),
            damage_named(tmp_path / "checkpoint.pt"),
        ):
            layer.load_state_dict({"weight": torch.ones(3, 3)})
