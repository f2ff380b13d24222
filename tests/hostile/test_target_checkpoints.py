"""Hostile MTP weights in a target's checkpoint, and hostile Gemma 4 assistants."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mtp_checkpoints
import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_target
from hostile_files import DAMAGES, INDEXES, WEIGHTS, Trap, change_config, write_index
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec.modeling.config_fields import check_sizes
from hf_specdec.modeling.mtp import load_mtp

SOME_DAMAGES = ("cut in the data", "a key twice", "overlapping", "an unknown dtype", "empty")
SOME_INDEXES = ("another folder", "an absolute path", "a URL", "a list", "a shard that is gone")
PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def mtp_folder(tmp_path: Path) -> Path:
    """A checkpoint of one file with an MTP layer, to be spoilt behind the target's back."""
    folder = tmp_path / "target"
    shutil.copytree(mtp_checkpoints.write("glm4_moe"), folder)
    shards = sorted(folder.glob("*.safetensors"))
    tensors = {name: t for shard in shards for name, t in load_file(shard).items()}
    for file in (*shards, *folder.glob("*.index.json")):
        file.unlink()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.fixture
def mtp_refused(mtp_folder: Path) -> Callable[..., None]:
    """``mtp_refused(spoil, match)``: loads the target, spoils its files, reads its MTP layers."""

    def check(spoil: Callable[[], object], match: str) -> None:
        target: Any = AutoModelForCausalLM.from_pretrained(mtp_folder)
        # Its weights are the file's memory, which goes when the file is cut.
        for tensor in (*target.parameters(), *target.buffers()):
            tensor.data = tensor.data.clone()
        spoil()
        for _ in range(2):
            before = dict(target.__dict__)
            with pytest.raises(ValueError, match=match):
                hf_specdec.attach(target, {"method": "mtp"})
            assert target.__dict__ == before
        target.generate(PROMPT, max_new_tokens=2, do_sample=False)

    return check


@pytest.mark.parametrize("damage", SOME_DAMAGES)
def test_mtp_weights_in_a_damaged_file(mtp_refused, mtp_folder: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    mtp_refused(lambda: spoil(mtp_folder / WEIGHTS), f"{WEIGHTS} .*{message}")


@pytest.mark.parametrize("index", SOME_INDEXES)
def test_mtp_weights_behind_an_index(mtp_refused, mtp_folder: Path, index: str) -> None:
    weight_map, message = INDEXES[index]
    if isinstance(weight_map, dict):
        weight_map = {"model.layers.3.eh_proj.weight": next(iter(weight_map.values()))}
        message = message.replace("'a'", r"'model\.layers.*'")
    mtp_refused(lambda: write_index(mtp_folder, weight_map), message)


def test_mtp_weights_that_a_shard_lacks(mtp_refused, mtp_folder: Path) -> None:
    shard, name = "model-00001-of-00001.safetensors", "model.layers.9.eh_proj.weight"
    spoil = lambda: write_index(mtp_folder, {name: shard})  # noqa: E731
    mtp_refused(spoil, f"{shard} should hold the MTP weight '{name}', which isn't in there")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_mtp_weights_that_are_no_floats(mtp_refused, mtp_folder: Path, dtype) -> None:
    def spoil() -> None:
        tensors = load_file(mtp_folder / WEIGHTS)
        tensors = {k: v.to(dtype) if "eh_proj" in k else v for k, v in tensors.items()}
        save_file(tensors, mtp_folder / WEIGHTS, {"format": "pt"})

    mtp_refused(spoil, f"holds the MTP weight '.*eh_proj.weight' as {dtype}")


def test_mtp_weights_with_scales_of_another_size(mtp_refused, mtp_folder: Path) -> None:
    def spoil() -> None:
        tensors = load_file(mtp_folder / WEIGHTS)
        name = next(name for name in tensors if name.endswith("eh_proj.weight"))
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(7, 7)
        save_file(tensors, mtp_folder / WEIGHTS, {"format": "pt"})

    mtp_refused(spoil, r"projection\S* has shape .*_scale_inv has \(7, 7\)")


def test_code_in_mtp_weights_is_not_run(mtp_refused, mtp_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    def spoil() -> None:
        (mtp_folder / WEIGHTS).unlink()
        content = {"model.layers.3.eh_proj.weight": Trap(marker)}
        torch.save(content, mtp_folder / "pytorch_model.bin")

    mtp_refused(spoil, "no pickle of tensors alone")
    assert not marker.exists()


@pytest.mark.parametrize("value", [10**9, 65, -1, "2", 1.5, True, [1]])
def test_absurd_numbers_of_mtp_modules(mtp_folder: Path, value: Any) -> None:
    target: Any = AutoModelForCausalLM.from_pretrained(mtp_folder)
    vars(target.config)["num_nextn_predict_layers"] = value
    with pytest.raises(ValueError, match=r"(must be an integer|must be 1 to 64).*"):
        load_mtp(target)


@pytest.fixture
def gemma_folder(tmp_path: Path) -> Path:
    """A good assistant's folder, with a centroid head."""
    gemma4_assistant(gemma4_target("31B"), centroids=True).save_pretrained(tmp_path / "assistant")
    return tmp_path / "assistant"


def gemma_refused(folder: Path, match: str) -> None:
    target = gemma4_target("31B")
    before = dict(target.__dict__)
    with pytest.raises(ValueError, match=match):
        hf_specdec.attach(target, {"model": str(folder)})
    assert target.__dict__ == before


@pytest.mark.parametrize("damage", SOME_DAMAGES)
def test_an_assistant_in_a_damaged_file(gemma_folder: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    spoil(gemma_folder / WEIGHTS)
    gemma_refused(gemma_folder, f"{WEIGHTS} .*{message}")


@pytest.mark.parametrize("index", SOME_INDEXES)
def test_an_assistant_behind_an_index(gemma_folder: Path, index: str) -> None:
    weight_map, message = INDEXES[index]
    write_index(gemma_folder, weight_map)
    gemma_refused(gemma_folder, message)


def _changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def test_an_assistant_with_missing_weights(gemma_folder: Path) -> None:
    _changed(gemma_folder, lambda t: t.pop("pre_projection.weight"))
    gemma_refused(gemma_folder, r"don't fit its config: 1 are missing, pre_projection\.weight")


def test_an_assistant_with_a_weight_of_another_shape(gemma_folder: Path) -> None:
    _changed(gemma_folder, lambda t: t.update({"pre_projection.weight": torch.ones(3, 3)}))
    gemma_refused(gemma_folder, r"wrong shape: pre_projection\.weight \(checkpoint \[3, 3\]")


def test_an_assistant_of_integers(gemma_folder: Path) -> None:
    _changed(gemma_folder, lambda t: t.update({k: v.int() for k, v in t.items() if "pre_" in k}))
    gemma_refused(gemma_folder, r"dtype that this network .*pre_projection\.weight \(I32\)")


@pytest.mark.parametrize("value", [-1, 64, 2**40, 5])
def test_a_table_of_ids_that_are_none(gemma_folder: Path, value: int) -> None:
    target = gemma4_target("31B")
    assistant = gemma4_assistant(target, centroids=True)
    table = assistant.masked_embedding.token_ordering
    good = table.clone()
    table.flatten()[(table.flatten() != 5).nonzero()[0]] = value
    with pytest.raises(ValueError, match="token_ordering of the assistant must name each id of 0"):
        target.generate(PROMPT, assistant_model=assistant, max_new_tokens=2)
    table.copy_(good)
    target.generate(PROMPT, assistant_model=assistant, max_new_tokens=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backbone_hidden_size", 10**15), ("num_centroids", 0), ("backbone_hidden_size", "x"),
        ("num_centroids", 7), ("centroid_intermediate_top_k", 10**9), ("text_config", 5),
    ],
)  # fmt: skip
def test_absurd_values_in_an_assistants_config(gemma_folder: Path, field: str, value: Any) -> None:
    change_config(gemma_folder, **{field: value})
    wrong = "wrong shape: masked_embedding.centroids" if value == 7 else "can't be read.*"
    gemma_refused(gemma_folder, f"{gemma_folder}.*{wrong}" if value != 7 else wrong)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", 2**40])
@pytest.mark.parametrize("inner", [False, True])
def test_sizes_outside_and_in_the_text_model(inner: bool, value: Any) -> None:
    text = SimpleNamespace(hidden_size=value if inner else 8)
    config = SimpleNamespace(vocab_size=8 if inner else value)
    config.get_text_config = lambda decoder: text
    name = "hidden_size" if inner else "vocab_size"
    with pytest.raises(ValueError, match=f"{name} must be an integer from 1 to .*, got "):
        check_sizes(config)
