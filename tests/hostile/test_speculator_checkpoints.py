"""Hostile checkpoints of MLP speculators: refused by name, whoever loads them."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import (
    DAMAGES,
    INDEXES,
    WEIGHTS,
    Trap,
    as_pickle,
    change_config,
    header_of,
    write_index,
)
from safetensors.torch import load_file, save_file
from tiny_pairs import random_speculator
from transformers import AutoModel
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli.app import app
from hf_specdec.cli.inspection import inspect_drafter
from hf_specdec.conversion.convert import convert

PROMPT = torch.tensor([[5, 6, 7, 8]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture
def folder(target, tmp_path: Path) -> Path:
    """A good speculator's folder, to be spoilt."""
    random_speculator(target).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def refused(target, folder: Path, tmp_path: Path) -> Callable[..., None]:
    """``refused(match)``: AutoModel, attach and (by headers) inspect refuse the folder.

    Behind that the target is as it was, and a good drafter still works.
    """

    def check(match: str, inspects: bool = True, converts: bool = True) -> None:
        before = dict(target.__dict__)
        with pytest.raises((ValueError, OSError), match=match):
            AutoModel.from_pretrained(folder)
        with pytest.raises(ValueError, match=match):
            hf_specdec.attach(target, {"model": str(folder)})
        assert target.__dict__ == before
        if inspects:
            with pytest.raises(ValueError, match=match):
                inspect_drafter(str(folder))
        if converts:
            with pytest.raises(ValueError, match=match):
                convert(folder, tmp_path / "converted")
            assert not (tmp_path / "converted").exists()
        plain = target.generate(PROMPT, **GREEDY)
        good = random_speculator(target)
        assert target.generate(PROMPT, **GREEDY, assistant_model=good).tolist() == plain.tolist()

    return check


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(refused, folder: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    spoil(folder / WEIGHTS)
    refused(f"{WEIGHTS} .*{message}")


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_that_leads_elsewhere(refused, folder: Path, tmp_path: Path, index: str) -> None:
    weight_map, message = INDEXES[index]
    write_index(folder, weight_map)
    # It is there, and would be read.
    (tmp_path / "other").mkdir()
    (folder / "model-00001-of-00001.safetensors").rename(tmp_path / "other" / WEIGHTS)
    refused(message)


def test_an_index_that_names_what_its_shard_lacks(refused, folder: Path) -> None:
    names = [name for name in header_of(folder / WEIGHTS)[0] if name != "__metadata__"]
    shard = "model-00001-of-00001.safetensors"
    write_index(folder, {**dict.fromkeys(names, shard), "speculator.emb.7.weight": shard})
    # Headers are read shard by shard: inspect has no need of the names.
    refused("emb.7.weight'?, not in there", inspects=False, converts=False)


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "complex64", "float8_e4m3fn"])
def test_weights_that_are_no_floats(refused, folder: Path, dtype: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(cast, folder / WEIGHTS, {"format": "pt"})
    refused(r"dtype that this network can't be run in: .*weight \(", False, False)
    # Whatever the config says of quantization that nobody knows.
    change_config(folder, quantization_config={"quant_method": "none of these"})
    with pytest.raises(ValueError, match=r"dtype that this network can't be run in: .*weight \("):
        AutoModel.from_pretrained(folder)


VALUES: tuple[Any, ...] = (10**15, -1, float("nan"), "7", [1], True, None, {}, 10**400)
SIZES = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "draft_vocab_size", "n_candidates")


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("field", SIZES)
def test_absurd_sizes(folder: Path, target, field: str, value: Any) -> None:
    change_config(folder, **{field: value})
    message = f"{field}.*(must be|larger than)|LSTM speculator"
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        hf_specdec.attach(target, {"model": str(folder)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 2**24, "emb_dim": 2**17, "inner_dim": 2**17}, "a network of .* weights"),
        ({"architectures": 5}, "architectures must be a list of class names, got 5"),
        ({"dtype": "float99"}, "dtype must be a floating-point dtype.*'float99'"),
        ({"torch_dtype": "int64"}, "torch_dtype must be a floating-point dtype.*'int64'"),
        ({"dtype": 5}, "dtype must be a floating-point dtype.*got 5"),
        ({"quantization_config": 5}, "quantization_config must be an object.*got 5"),
        ({"tie_weights": "yes"}, "tie_weights must be true or false, got 'yes'"),
        ({"tie_weights": 1}, "tie_weights must be true or false, got 1"),
        ({"top_k_tokens_per_head": [10**30] * 3}, "makes more than 65536 chains"),
        ({"top_k_tokens_per_head": "543"}, "top_k_tokens_per_head must be a list"),
        ({"to_dict": 1}, "to_dict=1 is no field of a config"),
        ({"inner_size": 1}, "inner_size=1 is no field of a config"),
        ({"__class__": 1}, "__class__=1 is no field of a config"),
        ({"__dict__": {"a": 1}}, "__dict__=.* is no field of a config"),
        ({"attribute_map": {"a": "b"}}, "attribute_map=.* is no field of a config"),
        ({"transformers_weights": "../../etc/passwd.safetensors"}, "passwd.safetensors"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_fields_of_the_config(folder: Path, target, fields, message: str) -> None:
    change_config(folder, **fields)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder)
    if "emb_dim" not in fields:  # which attach compares with the target first
        with pytest.raises(ValueError, match=message):
            hf_specdec.attach(target, {"model": str(folder)})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # kB


@pytest.mark.parametrize(
    "content", ["{", "[1]", "null", '"text"', "", "[" * 10**5, '{"n_predict": 1' + "0" * 5000 + "}"]
)
def test_a_config_that_is_no_object(folder: Path, target, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"speculative_config.model='{folder}' can't be read"):
        hf_specdec.attach(target, {"model": str(folder)})
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 1 and f"DRAFTER {folder}" in result.output


@pytest.mark.parametrize("value", [0, -1, 64, 2**40])
def test_draft_ids_that_no_vocabulary_has(make_speculator, tmp_path: Path, value: int) -> None:
    model = make_speculator(draft_vocab_size=8)
    model.speculator.draft_token_ids[1] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="token_ids must be draft_vocab_size=8 int64 ids"):
        AutoModel.from_pretrained(tmp_path)


class TestPickles:
    """``.bin`` files are read as tensors alone, and nothing in them is run."""

    def test_code_is_not_run(self, refused, folder: Path, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        as_pickle(folder, {"speculator.emb.0.weight": Trap(marker)})
        refused(r"pytorch_model\.bin.*no pickle of tensors alone", inspects=False)
        with pytest.raises(ValueError, match="no pickle of tensors alone"):
            AutoModel.from_pretrained(folder, weights_only=False)
        assert not marker.exists()

    def test_code_in_a_shard_is_not_run(self, refused, folder: Path, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        file = as_pickle(folder, {"speculator.emb.0.weight": Trap(marker)})
        file.rename(folder / "pytorch_model-1.bin")
        index = {"metadata": {}, "weight_map": {"speculator.emb.0.weight": "pytorch_model-1.bin"}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        refused("no pickle of tensors alone", inspects=False)
        assert not marker.exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([torch.ones(1)], "holds a list"),
            ({"speculator.emb.0.weight": 1}, r"speculator\.emb\.0\.weight.*no tensor"),
            ({7: torch.ones(1)}, "7 is no tensor|str"),
        ],
    )
    def test_something_else(self, folder: Path, target, content: Any, message: str) -> None:
        as_pickle(folder, content)
        with pytest.raises(ValueError, match=message):
            hf_specdec.attach(target, {"model": str(folder)})

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
    def test_a_file_that_is_cut_off(self, refused, folder: Path, share: float) -> None:
        file = as_pickle(folder, load_file(folder / WEIGHTS))
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])
        refused("can't be read as a torch checkpoint|no pickle of tensors", inspects=False)
