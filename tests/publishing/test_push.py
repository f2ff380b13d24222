"""What is sent to the Hub, to which a recording stands in."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from typer.testing import CliRunner

from hf_specdec.cli.app import app
from hf_specdec.publishing import hub
from hf_specdec.publishing.card import is_own
from hf_specdec.publishing.folder import PublishOptions, publish_folder


def check_call(name: str, *args: Any, **kwargs: Any) -> None:
    """The real thing takes these arguments."""
    inspect.signature(getattr(HfApi, name)).bind(None, *args, **kwargs)


class FakeHub:
    """Stands in for ``HfApi``: repositories are dictionaries of file contents."""

    def __init__(self) -> None:
        self.files: dict[str, str | None] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, token: Any = None) -> "FakeHub":
        self.calls.append(("login", {"token": token}))
        return self

    def create_repo(self, repo_id: str, **options: Any) -> SimpleNamespace:
        check_call("create_repo", repo_id, **options)
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))
        return SimpleNamespace(repo_id=repo_id)

    def file_exists(self, repo_id: str, name: str, revision: Any) -> bool:
        check_call("file_exists", repo_id, name, revision=revision)
        return name in self.files

    def hf_hub_download(self, repo_id: str, name: str, revision: Any) -> str:
        check_call("hf_hub_download", repo_id, name, revision=revision)
        path = self.folder / name
        path.write_text(self.files[name] or "")
        return str(path)

    def upload_folder(self, *, folder_path: Path, allow_patterns: list[str], **options: Any) -> str:
        places = {"folder_path": folder_path, "allow_patterns": allow_patterns}
        check_call("upload_folder", **places, **options)
        for name in allow_patterns:
            text = None if name.endswith(".safetensors") else (folder_path / name).read_text()
            self.files[name] = text
        self.calls.append(("upload_folder", options))
        return "commit"

    folder: Path


@pytest.fixture
def fake_hub(monkeypatch, tmp_path: Path) -> FakeHub:
    fake = FakeHub()
    fake.folder = tmp_path / "downloads"
    fake.folder.mkdir()
    monkeypatch.setattr(hub, "HfApi", fake)
    monkeypatch.setattr(
        hub.ModelCard, "validate", lambda card: fake.calls.append(("validate", {"card": str(card)}))
    )
    return fake


@pytest.fixture
def speculator(make_speculator):
    return make_speculator(base_model_name_or_path="owner/target")


def names(fake_hub: FakeHub) -> list[str]:
    return [name for name, _ in fake_hub.calls]


def test_model_is_pushed_complete(fake_hub, speculator) -> None:
    with pytest.warns(UserWarning, match="pushed without a tokenizer: .*'owner/target'"):
        commit = speculator.push_to_hub("me/drafter", private=True, token="t", tags=["mine"])
    assert commit == "commit"
    assert {"README.md", "config.json", "model.safetensors", "network.py",
            "custom_generate/generate.py"} <= fake_hub.files.keys()  # fmt: skip
    # Ours, where transformers would have put its template.
    card = fake_hub.files["README.md"]
    assert is_own(card) and 'from_pretrained("me/drafter"' in card and "- mine" in card
    assert names(fake_hub) == ["validate", "login", "create_repo", "upload_folder"]
    assert fake_hub.calls[1][1] == {"token": "t"}
    assert fake_hub.calls[2][1] == {"repo_id": "me/drafter", "private": True, "exist_ok": True}


def test_card_that_someone_wrote_on_the_hub_stays(fake_hub, speculator) -> None:
    fake_hub.files["README.md"] = "Their words."
    with pytest.warns(UserWarning, match="without a tokenizer"):
        speculator.push_to_hub("me/drafter")
    assert fake_hub.files["README.md"] == "Their words."
    assert "network.py" in fake_hub.files


def test_own_card_on_the_hub_is_replaced(fake_hub, speculator) -> None:
    for name in ("me/first", "me/second"):
        with pytest.warns(UserWarning, match="without a tokenizer"):
            speculator.push_to_hub(name)
    assert "me/second" in fake_hub.files["README.md"]


def test_save_pretrained_can_push(fake_hub, speculator, tmp_path) -> None:
    with pytest.warns(UserWarning, match="without a tokenizer"):
        speculator.save_pretrained(
            tmp_path / "drafter", push_to_hub=True, token="t", commit_message="First"
        )
    assert (tmp_path / "drafter" / "model.safetensors").exists()
    assert fake_hub.calls[2][1]["repo_id"] == "drafter"
    assert fake_hub.calls[-1][1]["commit_message"] == "First"
    assert "card_on_save.py" in fake_hub.files


def test_what_the_hub_refuses_is_not_sent(fake_hub, speculator, monkeypatch, tmp_path) -> None:
    def refuse(card: Any) -> None:
        raise ValueError("license is wrong")

    monkeypatch.setattr(hub.ModelCard, "validate", refuse)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="license is wrong"):
        speculator.push_to_hub("me/drafter")
    assert fake_hub.files == {} and "create_repo" not in names(fake_hub)
    with pytest.raises(ValueError, match="repo_id='a/b/c' is no Hub id"):
        speculator.push_to_hub("a/b/c")
    speculator.save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match="repo_id='not an id'"):
        hub.push_folder(tmp_path / "drafter", "not an id")
    (tmp_path / "drafter" / "README.md").unlink()
    with pytest.raises(ValueError, match="has no README.md; `hf-specdec publish`"):
        hub.push_folder(tmp_path / "drafter", "me/drafter")


def test_hub_out_of_reach(fake_hub, speculator, monkeypatch, tmp_path) -> None:
    def unreachable(card: Any) -> None:
        raise HTTPError("Name or service not known")

    monkeypatch.setattr(hub.ModelCard, "validate", unreachable)
    speculator.save_pretrained(tmp_path / "drafter")
    arguments = ["publish", str(tmp_path / "drafter"), "--no-tokenizer", "--push", "me/drafter"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 1 and "the Hub can't be reached: Name or service" in run.output
    assert fake_hub.files == {}


def test_drafter_of_nobody_is_not_pushed(fake_hub, make_speculator) -> None:
    with pytest.raises(ValueError, match="the target has no name"):
        make_speculator().push_to_hub("me/drafter")
    assert fake_hub.calls == []


def test_unknown_option(fake_hub, speculator) -> None:
    with pytest.warns(UserWarning), pytest.raises(TypeError, match="colour"):
        speculator.push_to_hub("me/drafter", colour="red")


def test_command_pushes_only_when_told(fake_hub, speculator, tmp_path) -> None:
    speculator.save_pretrained(tmp_path / "drafter")
    arguments = ["publish", str(tmp_path / "drafter"), "--no-tokenizer", "--license", "mit"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0 and fake_hub.calls == [], run.output
    run = CliRunner().invoke(app, [*arguments, "--push", "me/drafter"])
    assert run.exit_code == 0 and "upload_folder" in names(fake_hub), run.output
    assert "license: mit" in fake_hub.files["README.md"] and "Pushed 19 files" in run.output


def test_own_words_in_the_folder_are_sent(fake_hub, speculator, tmp_path) -> None:
    speculator.save_pretrained(tmp_path / "drafter")
    words = "---\nlicense: mit\n---\nMy words."
    (tmp_path / "drafter" / "README.md").write_text(words)
    publish_folder(tmp_path / "drafter", PublishOptions(tokenizer=False))
    fake_hub.files["README.md"] = "Older words."
    hub.push_folder(tmp_path / "drafter", "me/drafter")
    assert fake_hub.files["README.md"] == words
