"""Conversion loses nothing: every format to every other, tensor for tensor and bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel
from typer.testing import CliRunner

from hf_specdec.cli.app import app
from hf_specdec.conversion import ConvertOptions, convert
from hf_specdec.conversion.layout import PREFIX

NO_SCALE = ConvertOptions(scale_input=False)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8))
        for k in a
    )


def plain(model) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): t for name, t in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tied", "scaled"), [(False, False), (True, True)])
def test_to_fms_and_back_is_exact(save, tmp_path: Path, dtype, tied: bool, scaled: bool) -> None:
    folder, model = save(dtype, tie_weights=tied, scale_input=scaled, n_candidates=3)
    convert(folder, tmp_path / "fms.pth")
    state = torch.load(tmp_path / "fms.pth", weights_only=True)["model_state"]
    assert same_bits(state, plain(model))
    options = ConvertOptions(scale_input=scaled, n_candidates=3, top_k_tokens_per_head=[2, 2, 2, 2])
    convert(tmp_path / "fms.pth", tmp_path / "back", options)
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "back")
    )
    assert before == after
    files = [load_file(f / "model.safetensors") for f in (folder, tmp_path / "back")]
    assert same_bits(*files)
    assert len(files[0]) == (6 if tied else 20)
    convert(tmp_path / "back", tmp_path / "again.pth")
    again = torch.load(tmp_path / "again.pth", weights_only=True)["model_state"]
    assert same_bits(state, again)
    loaded = AutoModel.from_pretrained(tmp_path / "back", dtype="auto")
    state, token = torch.randn(2, 32, dtype=dtype), torch.tensor([3, 4])
    assert loaded.propose(state, token).equal(model.propose(state, token))


def test_tied_fms_file_holds_each_tensor_once(save, tmp_path: Path) -> None:
    folder, model = save(tie_weights=True)
    convert(folder, tmp_path / "fms.pth")
    size = sum(p.nbytes for p in model.parameters())
    assert size < (tmp_path / "fms.pth").stat().st_size < size + 16_000


def test_bare_fms_file_with_other_entries(save, tmp_path: Path) -> None:
    _, model = save()
    torch.save(plain(model), tmp_path / "bare.pth")
    convert(tmp_path / "bare.pth", tmp_path / "a", NO_SCALE)
    torch.save({"model_state": plain(model), "step": 7}, tmp_path / "training.pth")
    report = convert(tmp_path / "training.pth", tmp_path / "b", NO_SCALE)
    assert same_bits(*(load_file(tmp_path / f / "model.safetensors") for f in "ab"))
    assert "beside the weights, not carried over: step" in report.notes


def test_sizes_are_read_from_shapes(save, tmp_path: Path) -> None:
    folder, _ = save(n_predict=2, inner_dim=20)
    convert(folder, tmp_path / "fms.pth")
    options = ConvertOptions(scale_input=True, base_model="owner/target")
    convert(tmp_path / "fms.pth", tmp_path / "back", options)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    found = {k: config[k] for k in ("vocab_size", "emb_dim", "inner_dim", "n_predict")}
    assert found == {"vocab_size": 64, "emb_dim": 32, "inner_dim": 20, "n_predict": 2}
    assert config["scale_input"] is True and config["tie_weights"] is False
    assert config["base_model_name_or_path"] == "owner/target"
    assert config["top_k_tokens_per_head"] == [5, 4]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_bin_to_safetensors(save, tmp_path: Path, tied: bool, prefix: str) -> None:
    folder, model = save(tie_weights=tied)
    expected = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    state = {prefix + name: tensor for name, tensor in plain(model).items()}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "tokenizer.json").write_text("{}")
    report = convert(folder, tmp_path / "new")
    assert same_bits(load_file(tmp_path / "new" / "model.safetensors"), expected)
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "new" / "pytorch_model.bin").exists()
    assert report.bytes_before == report.bytes_after == sum(t.nbytes for t in expected.values())


def test_bin_shards(save, tmp_path: Path) -> None:
    folder, model = save()
    expected = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(expected)
    weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        shard = {name: expected[name] for name in names if weight_map[name] == file}
        torch.save(shard, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(folder, tmp_path / "new")
    assert same_bits(load_file(tmp_path / "new" / "model.safetensors"), expected)
    (folder / "pytorch_model-1.bin").unlink()
    with pytest.raises(ValueError, match="names pytorch_model-1.bin, which isn't there"):
        convert(folder, tmp_path / "third")


def arctic_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["top_k_tokens_per_head"]
    config["top_k_tokesns_per_head"] = [2, 2, 2, 2]
    config["architectures"] = "ArcticMLPSpeculatorPreTrainedModel"
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_arctic(save, tmp_path: Path) -> None:
    folder, model = save(torch.bfloat16)
    (folder / "README.md").unlink()
    arctic_config(folder)
    convert(folder, tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    assert config["top_k_tokens_per_head"] == [2, 2, 2, 2]
    assert "top_k_tokesns_per_head" not in config and config["dtype"] == "bfloat16"
    loaded = AutoModel.from_pretrained(tmp_path / "new", dtype="auto")
    assert same_bits(loaded.state_dict(), model.state_dict())


def test_arctic_lstm_is_refused(save, tmp_path: Path) -> None:
    folder, _ = save()
    arctic_config(folder, architectures="ArcticLSTMSpeculatorPreTrainedModel")
    with pytest.raises(ValueError, match="LSTM speculator"):
        convert(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_untied_and_tied_again(save, tmp_path: Path) -> None:
    folder, model = save(tie_weights=True)
    report = convert(folder, tmp_path / "untied", ConvertOptions(tie_weights=False))
    untied = load_file(tmp_path / "untied" / "model.safetensors")
    assert same_bits(untied, dict(model.state_dict())) and len(untied) == 20
    assert sum(row.remark == "its own copy" for row in report.rows) == 14
    report = convert(tmp_path / "untied", tmp_path / "tied", ConvertOptions(tie_weights=True))
    tied = [load_file(f / "model.safetensors") for f in (folder, tmp_path / "tied")]
    assert same_bits(*tied) and len(tied[0]) == 6
    assert sum(row.name is None for row in report.rows) == 14
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_weights"] is True


def test_only_equal_tensors_are_tied(save, tmp_path: Path) -> None:
    folder, _ = save(tie_weights=True)
    convert(folder, tmp_path / "untied", ConvertOptions(tie_weights=False))
    state = load_file(tmp_path / "untied" / "model.safetensors")
    # The same number, other bits.
    state["speculator.ln.2.bias"][0] = -0.0
    model = AutoModel.from_pretrained(tmp_path / "untied")
    model.load_state_dict(state)
    model.save_pretrained(tmp_path / "untied")
    with pytest.raises(ValueError, match=r"not equal.*: speculator.ln.2.bias and speculator.ln.0"):
        convert(tmp_path / "untied", tmp_path / "tied", ConvertOptions(tie_weights=True))


def test_tied_config_with_different_tensors_is_refused(save, tmp_path: Path) -> None:
    folder, model = save()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_weights": True}))
    with pytest.raises(ValueError, match="not equal"):
        convert(folder, tmp_path / "new")


def test_equal_fms_tensors_stay_untied_if_wished(save, tmp_path: Path) -> None:
    folder, _ = save(tie_weights=True)
    convert(folder, tmp_path / "fms.pth")
    options = ConvertOptions(scale_input=False, tie_weights=False)
    convert(tmp_path / "fms.pth", tmp_path / "new", options)
    assert len(load_file(tmp_path / "new" / "model.safetensors")) == 20
    AutoModel.from_pretrained(tmp_path / "new")


def test_dtype(save, tmp_path: Path) -> None:
    folder, model = save(draft_vocab_size=8)
    report = convert(folder, tmp_path / "new", ConvertOptions(dtype="bfloat16"))
    state = load_file(tmp_path / "new" / "model.safetensors")
    expected = {k: t if t.dtype == torch.int64 else t.bfloat16() for k, t in
                model.state_dict().items()}  # fmt: skip
    assert same_bits(state, expected)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {row.dtype_after for row in report.rows} == {"bfloat16", "int64"}
    assert report.bytes_after < 0.55 * report.bytes_before


def test_value_too_large_for_the_dtype(save, tmp_path: Path) -> None:
    folder, model = save()
    with torch.no_grad():
        model.speculator.head[1].weight[3, 2] = 70000.0
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"dtype=float16: speculator.head.1.weight .* 7e\+04"):
        convert(folder, tmp_path / "new", ConvertOptions(dtype="float16"))
    convert(folder, tmp_path / "new", ConvertOptions(dtype="bfloat16"))


def broken(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    if how == "unknown":
        return {**state, "ln0.weight": torch.ones(3)}
    if how == "missing":
        return {k: v for k, v in state.items() if k != "ln.1.bias"}
    if how == "shape":
        return {**state, "head.2.weight": torch.ones(3, 24)}
    if how == "dtype":
        return {**state, "head.2.weight": torch.ones(64, 24, dtype=torch.int8)}
    if how == "gap":
        return {k: v for k, v in state.items() if not k.startswith("emb.1.")}
    return {**state, "speculator.ln.0.bias": state["ln.0.bias"]}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown", "no place in the network for speculator.ln0.weight"),
        ("missing", "missing: speculator.ln.1.bias"),
        ("shape", r"speculator.head.2.weight is \[3, 24\], expected \[64, 24\]"),
        ("dtype", "speculator.head.2.weight has dtype torch.int8"),
        ("gap", "no MLP speculator"),
        ("twice", "both with the prefix"),
    ],
)
def test_no_tensor_is_lost(save, tmp_path: Path, how: str, message: str) -> None:
    _, model = save()
    torch.save({"model_state": broken(plain(model), how)}, tmp_path / "fms.pth")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "fms.pth", tmp_path / "new", NO_SCALE)
    assert not (tmp_path / "new").exists()


def test_tensors_beside_the_weights_are_not_lost(save, tmp_path: Path) -> None:
    _, model = save()
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}}
    torch.save({"model_state": plain(model), "optimizer": optimizer}, tmp_path / "fms.pth")
    with pytest.raises(ValueError, match=r"tensors under \['optimizer'\]"):
        convert(tmp_path / "fms.pth", tmp_path / "new", NO_SCALE)


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("was-run"),))


def test_pickled_code_is_not_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model_state": {"emb.0.weight": Malicious()}}, tmp_path / "fms.pth")
    with pytest.raises(ValueError, match="no pickle of tensors alone"):
        convert(tmp_path / "fms.pth", tmp_path / "new", NO_SCALE)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint at all", b"\x80\x02K\x01."])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fms.pth").write_bytes(content)
    with pytest.raises(ValueError, match="fms.pth"):
        convert(tmp_path / "fms.pth", tmp_path / "new", NO_SCALE)


def test_truncated_file(save, tmp_path: Path) -> None:
    folder, _ = save()
    convert(folder, tmp_path / "fms.pth")
    content = (tmp_path / "fms.pth").read_bytes()
    (tmp_path / "fms.pth").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="fms.pth"):
        convert(tmp_path / "fms.pth", tmp_path / "new", NO_SCALE)


def test_file_in_torchs_old_format(save, tmp_path: Path) -> None:
    folder, model = save()
    state = {"model_state": plain(model)}
    torch.save(state, tmp_path / "fms.pth", _use_new_zipfile_serialization=False)
    convert(tmp_path / "fms.pth", tmp_path / "new", NO_SCALE)
    assert same_bits(load_file(tmp_path / "new" / "model.safetensors"), dict(model.state_dict()))


def test_options_that_only_fms_files_need(save, tmp_path: Path) -> None:
    folder, _ = save()
    convert(folder, tmp_path / "fms.pth")
    with pytest.raises(ValueError, match="scale_input must be given"):
        convert(tmp_path / "fms.pth", tmp_path / "new")
    with pytest.raises(ValueError, match="scale_input, n_candidates: for fms files alone"):
        convert(folder, tmp_path / "new", ConvertOptions(scale_input=True, n_candidates=2))


@pytest.mark.parametrize(
    "fields", [{"draft_vocab_size": 8}, {"share_target_weights": True}], ids=lambda f: next(iter(f))
)
def test_fms_has_no_place_for_our_extensions(save, tmp_path: Path, fields) -> None:
    folder, model = save(**fields)
    with pytest.raises(ValueError, match=f"fms has no speculators with {next(iter(fields))}"):
        convert(folder, tmp_path / "fms.pth")
    convert(folder, tmp_path / "new")
    assert same_bits(load_file(tmp_path / "new" / "model.safetensors"), dict(model.state_dict()))


def test_other_sources_are_refused(save, make_target, tmp_path: Path) -> None:
    folder, _ = save()
    make_target("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="model_type='llama'"):
        convert(tmp_path / "llama", tmp_path / "new")
    with pytest.raises(ValueError, match="is a file, but no fms checkpoint"):
        convert(folder / "model.safetensors", tmp_path / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no config.json"):
        convert(tmp_path / "empty", tmp_path / "new")
    with pytest.raises(ValueError, match="neither a file nor a folder, nor a model"):
        convert("owner/no-such-model", tmp_path / "new")
    with pytest.raises(ValueError, match=r"dtype='int8' must be one of \['float32'"):
        convert(folder, tmp_path / "new", ConvertOptions(dtype="int8"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        convert(folder, tmp_path / "new")


def test_destination_is_not_overwritten(save, tmp_path: Path) -> None:
    folder, _ = save()
    new = tmp_path / "new"
    new.mkdir()
    convert(folder, new)
    (new / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and isn't empty.*--force"):
        convert(folder, new)
    assert (new / "mine.txt").exists()
    convert(folder, new, ConvertOptions(force=True, dtype="float16"))
    assert not (new / "mine.txt").exists()
    assert load_file(new / "model.safetensors")["speculator.ln.0.bias"].dtype == torch.float16
    for place in (folder, folder / "inside", tmp_path):
        with pytest.raises(ValueError, match="is SOURCE, or one is inside the other"):
            convert(folder, place, ConvertOptions(force=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file, but a folder"):
        convert(folder, tmp_path / "file", ConvertOptions(force=True))


@pytest.mark.parametrize("name", ["new", "new.pth"])
def test_failure_leaves_the_destination_as_it_was(
    save, tmp_path: Path, monkeypatch, name: str
) -> None:
    folder, model = save()
    convert(folder, tmp_path / name)
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    def disk_full(*args, **kwargs) -> None:
        Path(args[1] if name == "new.pth" else args[0] / "half").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    monkeypatch.setattr(type(model), "save_pretrained", lambda self, path: disk_full(path))
    with pytest.raises(OSError, match="No space left"):
        convert(folder, tmp_path / name, ConvertOptions(force=True))
    assert before == {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}


def test_command(save, tmp_path: Path) -> None:
    folder, _ = save(tie_weights=True)
    run = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "fms.pth")])
    assert run.exit_code == 0, run.output
    assert "renamed: 6 tensors, as speculator.emb.0.weight -> emb.0.weight" in run.output
    assert "--no-scale-input" in run.output and "6, now 6" in run.output
    arguments = ["convert", str(tmp_path / "fms.pth"), str(tmp_path / "new")]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 1 and "scale_input must be given" in run.output
    assert not (tmp_path / "new").exists()
    run = CliRunner().invoke(app, [*arguments, "--no-scale-input", "--top-k", "2,x"])
    assert run.exit_code == 2 and "joined by commas" in run.output
    run = CliRunner().invoke(app, [*arguments, "--no-scale-input", "--top-k", "2,2,2,2"])
    assert run.exit_code == 0, run.output
    assert "they are tied" in run.output.replace("\n", " ")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["top_k_tokens_per_head"] == [2, 2, 2, 2] and config["tie_weights"] is True
