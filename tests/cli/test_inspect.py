"""`inspect`: what a checkpoint is, from its config and headers, and whether it fits a target."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mtp_checkpoints
import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_target
from tiny_pairs import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdec import MLPSpeculatorConfig
from hf_specdec.cli import checkpoint_headers, fit
from hf_specdec.cli.app import app
from hf_specdec.cli.checkpoint_headers import read_headers
from hf_specdec.cli.inspection import Inspection, inspect_drafter
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM


def checks_of(found: Inspection) -> dict[str, bool | None]:
    return {check.name: check.ok for check in found.checks}


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may read a weight: neither a model is loaded nor a file opened for it."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(torch, "load", refuse)
    for name in ("transformers.modeling_utils.safe_open", "safetensors.torch.load_file"):
        monkeypatch.setattr(name, refuse)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., str]:
    """``write_config(**fields)``: a folder with nothing but a config."""

    def write(**fields: Any) -> str:
        folder = tmp_path / "config"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        return str(folder)

    return write


def test_speculator_that_fits(pair_folders: tuple[Path, Path]) -> None:
    target, drafter = map(str, pair_folders)
    found = inspect_drafter(drafter, target, "float16")
    assert (found.kind, found.model_type) == ("mlp_speculator", "mlp_speculator")
    assert found.shape["n_predict"] == 3
    assert found.shape["emb_dim"] == 32
    # Counted by hand: three heads of embedding, projection, scale and shift, and output.
    heads = 3 * (64 * 24 + 24 + 24 + 64 * 24) + 32 * 24 + 2 * 24 * 24
    assert found.num_parameters == heads
    assert found.stored_dtypes == ["F32"]
    assert found.memory_bytes == 2 * heads
    assert inspect_drafter(drafter).memory_bytes == 4 * heads
    assert checks_of(found) == {
        "hidden size": True, "configs": True, "vocabulary": True, "tokenizer": None,
    }  # fmt: skip
    assert found.fits
    assert found.speculative_config == {
        "method": "mlp_speculator",
        "model": drafter,
        "num_speculative_tokens": 3,
    }


def test_python_lines_run(pair_folders: tuple[Path, Path], monkeypatch: Any) -> None:
    target, drafter = map(str, pair_folders)
    found = inspect_drafter(drafter, target)
    monkeypatch.undo()  # now weights may be read
    assert found.python is not None
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 4}
    names: dict[str, Any] = {"inputs": inputs}
    exec(found.python.replace('device_map="auto"', "device_map='cpu'"), names)
    assert names["hf_specdec"].speculation_totals(names["target"]).snapshot().num_new_tokens == 4


def test_speculator_that_does_not_fit(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = map(str, pair_folders)
    config = MLPSpeculatorConfig(
        vocab_size=9000, emb_dim=48, inner_dim=8, n_predict=1, top_k_tokens_per_head=[1],
        base_model_name_or_path="the/other",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = inspect_drafter(str(tmp_path), target)
    assert checks_of(found)["hidden size"] is False
    (configs,) = (check for check in found.checks if check.name == "configs")
    assert "It was trained for the/other." in configs.detail
    assert found.fits is False
    assert found.trained_for == "the/other"
    assert found.notes == ["No header of its weights could be read."]
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--target", target])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert CliRunner().invoke(app, ["inspect", drafter, "--target", target]).exit_code == 0


def test_tokenizers_are_compared_by_every_id(
    pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = pair_folders
    folder = tmp_path / "drafter"
    shutil.copytree(drafter, folder)
    make_tokenizer().save_pretrained(folder)
    assert checks_of(inspect_drafter(str(folder), str(target)))["tokenizer"] is True
    file = folder / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(text))
    found = inspect_drafter(str(folder), str(target))
    (check,) = (check for check in found.checks if check.name == "tokenizer")
    assert check.ok is False
    assert check.detail == "2 tokens have other ids: 'a' is 4 here and 3 there"


def test_mtp_in_a_model_of_two_shards() -> None:
    folder = mtp_checkpoints.write("glm4_moe")
    found = inspect_drafter(str(folder), str(folder))
    assert found.kind == "mtp"
    assert found.speculative_config == {
        "method": "mtp",
        "num_speculative_tokens": found.shape["n_predict"],
    }
    whole = read_headers(str(folder)).num_parameters
    layers = found.shape["num_hidden_layers"]
    own = [t for t in read_headers(str(folder)).tensors if f".layers.{layers}." in t.name]
    shared = [t for t in own if "embed_tokens" in t.name or "shared_head.head" in t.name]
    assert 0 < found.num_parameters < whole
    assert found.num_parameters == sum(t.num_elements for t in own) - sum(
        t.num_elements for t in shared
    )
    assert found.trained_for == str(folder)
    assert found.fits
    assert inspect_drafter(str(folder), "another").fits is False


def test_mimo_and_a_checkpoint_that_lost_its_layers(tmp_path: Path) -> None:
    config = MiMoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = MiMoForCausalLM(config)
    model.save_pretrained(tmp_path)
    found = inspect_drafter(str(tmp_path))
    assert (found.kind, found.shape["n_predict"]) == ("mtp", 1)
    assert found.num_parameters == sum(p.numel() for p in model.model.mtp_layers.parameters())
    # transformers builds this one without them.
    config = mtp_checkpoints.config_of(mtp_checkpoints.FAMILIES["glm4_moe"])
    lost = tmp_path / "lost"
    AutoModelForCausalLM.from_config(config).save_pretrained(lost)
    found = inspect_drafter(str(lost))
    assert (found.kind, found.num_parameters) == ("mtp", 0)
    assert any("holds no weights of MTP layers" in note for note in found.notes)


def test_gemma4_assistant(tmp_path: Path) -> None:
    target = gemma4_target("E2B")
    assistant = gemma4_assistant(target)
    assistant.save_pretrained(tmp_path / "assistant")
    target.config.save_pretrained(tmp_path / "target")
    found = inspect_drafter(str(tmp_path / "assistant"), str(tmp_path / "target"), "bfloat16")
    assert found.kind == "gemma4_assistant"
    assert found.shape["backbone_hidden_size"] == target.config.hidden_size
    assert checks_of(found)["configs"] is True
    # Tied tables are stored once; each layer has a factor that is a buffer.
    stored = {t.data_ptr(): t.numel() for t in assistant.state_dict().values()}
    assert found.num_parameters == sum(stored.values())
    assert found.speculative_config is not None
    assert found.speculative_config["method"] == "mtp"
    other = inspect_drafter(str(tmp_path / "assistant"), str(mtp_checkpoints.write("glm4_moe")))
    assert other.fits is False


def test_plain_model(pair_folders: tuple[Path, Path]) -> None:
    target, drafter = map(str, pair_folders)
    found = inspect_drafter(target, target)
    assert found.kind == "draft_model"
    assert found.fits
    assert checks_of(found) == {"vocabulary": True, "tokenizer": True}
    assert found.python is not None
    assert "assistant_model=assistant" in found.python


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"architectures": ["Eagle"]}, "no model_type"),
        ({"speculators_model_type": "eagle3", "model_type": "llama"}, "method='eagle3' of vLLM"),
        ({"model_type": "never_heard"}, "model_type='never_heard'"),
        ({"model_type": "vit"}, "generates no text"),
        ({"model_type": "mlp_speculator", "n_predict": 0}, "n_predict"),
    ],
)
def test_unknown_checkpoints_say_what_is_known(
    write_config: Callable[..., str], pair_folders: Any, fields: dict[str, Any], note: str
) -> None:
    found = inspect_drafter(write_config(**fields), str(pair_folders[0]))
    assert found.kind == "unknown"
    assert any(note in entry for entry in found.notes), found.notes
    assert (found.python, found.speculative_config, found.fits) == (None, None, False)


def test_places_without_a_config_are_refused(
    tmp_path: Path, pair_folders: tuple[Path, Path]
) -> None:
    with pytest.raises(ValueError, match=r"DRAFTER .*: no config.json can be read there"):
        inspect_drafter(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"--target nowhere/at-all: no config can be read"):
        inspect_drafter(str(pair_folders[1]), "nowhere/at-all")


def test_pickles_are_not_opened(write_config: Callable[..., str]) -> None:
    folder = Path(write_config(**MLPSpeculatorConfig().to_dict()))
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    found = inspect_drafter(str(folder))
    assert (found.pickled_bytes, found.num_parameters) == (1000, 0)
    assert any("pickled and were not opened" in note for note in found.notes)


@pytest.mark.parametrize("content", [b"", b"abc", (2**40).to_bytes(8, "little"), b"\2" + b"\0" * 7])
def test_a_file_without_a_header_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        read_headers(str(tmp_path))


def test_on_the_hub_headers_alone_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(shape=[2, 3], dtype="BF16")
    file = SimpleNamespace(tensors={"a": info, "b": info})
    asked = []

    def metadata(name: str, revision: str | None) -> Any:
        asked.append((name, revision))
        return SimpleNamespace(files_metadata={"one.safetensors": file})

    monkeypatch.setattr(checkpoint_headers, "get_safetensors_metadata", metadata)
    headers = read_headers("some/where", "main")
    assert asked == [("some/where", "main")]
    assert (headers.num_parameters, headers.num_bytes(), headers.num_bytes(4)) == (12, 24, 48)


def test_command_prints_tables_or_json(pair_folders: tuple[Path, Path]) -> None:
    target, drafter = map(str, pair_folders)
    arguments = ["inspect", drafter, "--target", target]
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).output
    for words in ("is an MLP speculator", "n_predict", f"Fits {target}? yes", "hf_specdec.attach("):
        assert words in text
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert document["fits"] is True
    assert document["checks"][0] == {
        "name": "hidden size",
        "ok": True,
        "detail": "reads states of 32, the target has 32",
    }


def test_the_demos_target_is_read_from_its_gguf_file(
    monkeypatch: pytest.MonkeyPatch, pair_folders: tuple[Path, Path]
) -> None:
    """By transformers, which dequantizes nothing for a config."""
    read = []

    def config_of(name: str, gguf_file: str | None = None) -> Any:
        read.append((name, gguf_file))
        return original(name)

    original = AutoConfig.from_pretrained
    monkeypatch.setattr(fit, "find_target_file", lambda: pair_folders[0] / "model.gguf")
    monkeypatch.setattr(AutoConfig, "from_pretrained", config_of)
    monkeypatch.setattr(fit, "_tokenizer", lambda name, **options: None)
    assert inspect_drafter(str(pair_folders[1]), "demo").fits
    assert read[-1] == (str(pair_folders[0]), "model.gguf")


def test_the_demos_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect_drafter("demo")
    assert found.trained_for == "HuggingFaceTB/SmolLM2-135M-Instruct"
    # The table of draft ids is no parameter.
    assert found.num_parameters == 6_236_160 - 4096
    assert found.notes == [
        "vLLM doesn't know share_target_weights and draft_vocab_size: it runs here only."
    ]
