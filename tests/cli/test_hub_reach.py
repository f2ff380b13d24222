"""A Hub that doesn't answer is asked once, and named; nothing is waited for."""

import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from hf_specdec.cli import hub_reach
from hf_specdec.cli.app import app
from hf_specdec.cli.hub_reach import check_reachable

# Nothing listens there.
ENDPOINT = "http://127.0.0.1:9"


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and no pause between two attempts."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", ENDPOINT)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["inspect", "some/drafter"], "DRAFTER some/drafter"),
        (["inspect", "demo", "--target", "some/target"], "--target some/target"),
        (["generate", "some/target", "a cat"], "TARGET some/target"),
        (
            ["generate", "demo", "a cat", "--spec-model", "some/drafter"],
            "--spec-model some/drafter",
        ),
        (["doctor", "some/target"], "TARGET some/target"),
        (["doctor", "demo", "some/drafter"], "ASSISTANT some/drafter"),
    ],
)
def test_commands_say_so_at_once(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, arguments)
    text = " ".join(result.output.split())
    assert result.exit_code == 1, text
    assert f"{named}: there is no such folder here and no copy in the cache" in text
    assert f"the Hub ({ENDPOINT}) can't be reached (" in text
    assert "name a folder; HF_HUB_OFFLINE=1 keeps to what is on this machine" in text


@pytest.mark.usefixtures("unreachable")
def test_what_is_here_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: str) -> None:
        raise AssertionError("the Hub is asked")

    monkeypatch.setattr(hub_reach, "get_hf_file_metadata", ask)
    for here in (None, str(tmp_path), "/no/such/folder", object()):
        check_reachable(here, "TARGET")
    with pytest.raises(ValueError, match=r"TARGET some/target: .*reached \(the Hub is asked\)"):
        check_reachable("some/target", "TARGET")
    file = tmp_path / "config.json"
    file.touch()
    monkeypatch.setattr(hub_reach, "try_to_load_from_cache", lambda *_: str(file))
    check_reachable("some/target", "TARGET")


def test_offline_the_hub_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", ENDPOINT)
    check_reachable("some/target", "TARGET")
