"""What `hf-specdec publish` makes of a folder, and what it doesn't touch."""

import json
from pathlib import Path

import pytest
from card_numbers import RESULT, SPEED
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner

from hf_specdec.cli.app import app
from hf_specdec.modeling.mimo import mimo_from_llama
from hf_specdec.publishing.folder import PublishOptions, TokenizerError, publish_folder
from hf_specdec.publishing.hub import files_to_push

NAMED = PublishOptions(base_model="owner/target", tokenizer=False)
CODE = [
    "arguments.py", "candidates.py", "card_on_save.py", "checkpoint_files.py",
    "checkpoint_headers.py", "config_fields.py", "configuration_mlp_speculator.py", "largest.py",
    "loading.py", "loss.py", "modeling_mlp_speculator.py", "network.py",
    "target_binding.py", "target_tables.py",
]  # fmt: skip
GENERATE = ["custom_generate/generate.py", "custom_generate/requirements.txt"]


@pytest.fixture
def folder(make_speculator, tmp_path: Path) -> Path:
    make_speculator().save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def target_folder(target, tokenizer, tmp_path: Path) -> Path:
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_everything_is_there(folder: Path, target_folder: Path, tokenizer) -> None:
    options = PublishOptions(target=str(target_folder), base_model="owner/target", license="mit")
    before = config_of(folder)
    published = publish_folder(folder, options)
    assert set(published.written) >= {"README.md", "config.json", *CODE, *GENERATE}
    assert set(contents(folder)) == {
        "README.md", "config.json", "model.safetensors", *CODE, *GENERATE,
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    config = config_of(folder)
    assert config.pop("auto_map")["AutoModel"].startswith("modeling_mlp_speculator.")
    assert config.pop("base_model_name_or_path") == "owner/target"
    assert config == before
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded("Why w1").input_ids == tokenizer("Why w1").input_ids
    card = (folder / "README.md").read_text()
    assert "apply_chat_template" in card and "license: mit" in card and "- custom_generate" in card
    assert files_to_push(folder) == sorted(contents(folder))


def test_tokenizer_files_that_are_no_text(folder: Path, target_folder: Path, monkeypatch) -> None:
    save = PreTrainedTokenizerBase.save_pretrained

    def with_model(self, directory, *args, **kwargs):
        (Path(directory) / "tokenizer.model").write_bytes(b"\x0a\xff\r\n\x00")
        return save(self, directory, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", with_model)
    options = PublishOptions(target=str(target_folder), base_model="owner/target")
    assert "tokenizer.model" in publish_folder(folder, options).written
    assert (folder / "tokenizer.model").read_bytes() == b"\x0a\xff\r\n\x00"


def test_a_second_time_changes_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(json.dumps(SPEED))
    options = PublishOptions(
        base_model="owner/target", tokenizer=False, license="mit", datasets=("owner/data",),
        speed=tmp_path / "speed.json",
    )  # fmt: skip
    publish_folder(folder, options)
    before = contents(folder)
    assert "training/speed.json" in before and "78.2 tok/s" in before["README.md"].decode()
    # What was said once needn't be said again.
    again = publish_folder(folder, PublishOptions(tokenizer=False))
    assert again.written == () and contents(folder) == before
    assert publish_folder(folder, PublishOptions(tokenizer=False, license="other")).written == (
        "README.md",
    )


def test_readme_of_the_owner_stays(folder: Path) -> None:
    (folder / "README.md").write_text("My words.")
    published = publish_folder(folder, NAMED)
    assert (folder / "README.md").read_text() == "My words."
    assert "README.md" in published.kept and "left as it is" in published.notes[0]
    assert "no metadata" in published.notes[1]
    (folder / "README.md").write_text("---\nbase_model: owner/target\n---\nMy words.")
    assert publish_folder(folder, NAMED).notes[1] == "README.md doesn't say: license"


def test_training_state_is_not_pushed(folder: Path) -> None:
    (folder / "training").mkdir()
    for name in ("checkpoint.pt", "log.jsonl", "result.json", "curve.png"):
        (folder / "training" / name).write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("{}")
    names = files_to_push(folder)
    assert names == [
        "README.md", "config.json", "model.safetensors", "training/curve.png",
        "training/result.json",
    ]  # fmt: skip


def test_names_of_folders_are_not_published(folder: Path) -> None:
    target = {**RESULT["target"], "name": "/home/me/target"}
    training = {**RESULT["training"], "continued_from": "/home/me/earlier"}
    result = {**RESULT, "target": target, "training": training}
    given = {
        **result,
        "data": {**RESULT["data"], "files": ["/home/me/a.txt", "~me/b.txt", "c.txt"]},
    }
    result["data"] = {**RESULT["data"], "files": ["a.txt", "b.txt", "c.txt"]}
    settings = {"target": "/home/me/target", "drafter": "../me/home/drafter", "max_new_tokens": 128}
    (folder / "training").mkdir()
    (folder / "training" / "speed.json").write_text(json.dumps({**SPEED, "settings": settings}))
    (folder / "training" / "result.json").write_text(json.dumps(given))
    config = {**config_of(folder), "base_model_name_or_path": "/home/me/target"}
    (folder / "config.json").write_text(json.dumps(config))
    publish_folder(folder, NAMED)
    for name in files_to_push(folder):
        assert b"/home" not in (folder / name).read_bytes(), name
    kept = json.loads((folder / "training" / "result.json").read_text())
    assert kept["target"]["name"] == "owner/target"
    assert kept == {**result, "target": kept["target"], "training": kept["training"]}
    speed = json.loads((folder / "training" / "speed.json").read_text())
    named = {"target": "owner/target", "drafter": "drafter"}
    assert speed == {**SPEED, "settings": {**settings, **named}}
    assert "| continued from | earlier |" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["network.py", "custom_generate/generate.py"])
def test_files_in_the_way_are_not_overwritten(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("# mine\n")
    before = contents(folder)
    with pytest.raises(ValueError, match=f"{name}' is in the way"):
        publish_folder(folder, NAMED)
    assert contents(folder) == before


def test_nothing_is_written_when_something_is_wrong(
    folder: Path, target_folder: Path, make_target, tmp_path: Path
) -> None:
    before = contents(folder)
    make_target("gpt_bigcode").save_pretrained(tmp_path / "bare")
    wider = make_target("llama").config.to_dict() | {"hidden_size": 48}
    (tmp_path / "wider").mkdir()
    (tmp_path / "wider" / "config.json").write_text(json.dumps(wider))
    for options, error, message in (
        (PublishOptions(tokenizer=False), ValueError, "Name it with --base-model"),
        (PublishOptions(base_model="owner/target"), TokenizerError, "'owner/target' can't be read"),
        (PublishOptions(base_model="a/b", license="No!"), ValueError, "license='No!'"),
        (PublishOptions(base_model="a b"), ValueError, "base_model='a b' is no Hub id"),
        (PublishOptions(repo_id="a/b/c"), ValueError, "repo_id='a/b/c' is no Hub id"),
        (PublishOptions(base_model="a/b", target=str(tmp_path / "wider")), ValueError,
         "hidden_size=48, but the drafter reads states of width emb_dim=32"),
        (PublishOptions(base_model="a/b", target=str(tmp_path / "none")), ValueError,
         "can't be read"),
    ):  # fmt: skip
        if "license" in message:
            options = PublishOptions(**{**vars(options), "target": str(target_folder)})
        with pytest.raises(error, match=message):
            publish_folder(folder, options)
        assert contents(folder) == before


def test_folders_without_a_drafter(folder: Path, target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_type='llama'; drafters .*'mimo', 'mlp_spec"):
        publish_folder(target_folder, NAMED)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        publish_folder(tmp_path / "empty", NAMED)
    config = config_of(folder)
    fewer = {"n_predict": 3, "top_k_tokens_per_head": [2, 2, 2]}
    (folder / "config.json").write_text(json.dumps({**config, **fewer}))
    with pytest.raises(ValueError, match="do not fit its config"):
        publish_folder(folder, NAMED)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights in safetensors; `hf-specdec convert`"):
        publish_folder(folder, NAMED)


def test_mtp_checkpoint(target, tokenizer, tmp_path: Path) -> None:
    """A model that drafts for itself is published with its code, and without custom_generate."""
    folder = tmp_path / "tiny-mtp"
    mimo_from_llama(target).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    publish_folder(folder, PublishOptions(base_model="owner/target", license="mit"))
    assert not (folder / "custom_generate").exists()
    card = (folder / "README.md").read_text()
    assert '"method": "mtp"' in card and "base_model_relation: finetune" in card
    assert (folder / "modeling_mimo.py").exists()
    AutoModelForCausalLM.from_pretrained(folder)
    # Nothing in its config says whose it is, but its card does.
    assert publish_folder(folder).written == ()


def test_command(folder: Path, target_folder: Path, tmp_path: Path) -> None:
    arguments = ["publish", str(folder), "--target", str(target_folder)]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 1 and "--base-model" in run.output
    (tmp_path / "speed.json").write_text(json.dumps(SPEED))
    run = CliRunner().invoke(
        app, [*arguments, "--base-model", "owner/target", "--dataset", "a/b", "--dataset", "c/d",
              "--speed", str(tmp_path / "speed.json")],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    assert "Nothing was sent" in run.output and "no licence" in run.output
    card = (folder / "README.md").read_text()
    assert "- a/b\n- c/d\n" in card and "78.2 tok/s" in card
