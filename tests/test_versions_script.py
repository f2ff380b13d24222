"""`.ci/versions`: which versions it tries, and that a cell which fails is a failure."""

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("versions_script", str(ROOT / ".ci" / "versions"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)  # for its dataclasses
    loader.exec_module(module)
    return module


def run_main(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["versions", *arguments])
    return script.main()


def test_the_newest_release_is_found_in_what_pip_says(script: Any) -> None:
    listing = "torch (2.15.0)\nAvailable versions: 2.15.0rc1, 2.9.1, 2.10.0, 2.13.0+cpu, 2.13.0\n"
    assert script.newest(listing) == "2.13.0"
    assert script.newest(listing, local="+cpu") == "2.13.0"
    assert script.newest("Available versions: 2.9.1, 2.10.0") == "2.10.0"
    assert script.newest("Available versions: 2.9.1, 2.10.0", local="+cpu") is None
    assert script.newest("ERROR: no such package") is None


def test_the_plan_has_the_floors_and_the_newest(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = script.floor("torch", PYPROJECT), script.floor("transformers", PYPROJECT)
    assert f'"torch>={old[0].removesuffix(".0")}"' in PYPROJECT
    monkeypatch.setattr(script, "newest_versions", lambda python: ("9.1.0", "8.0.1"))
    assert run_main(script, monkeypatch, "--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"torch {a}, transformers {b}"
        for a, b in (old, (old[0], "8.0.1"), ("9.1.0", old[1]), ("9.1.0", "8.0.1"))
    ]
    # What is both oldest and newest is tried once.
    monkeypatch.setattr(script, "newest_versions", lambda python: ("9.1.0", old[1]))
    assert run_main(script, monkeypatch, "--list") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(SystemExit, match="no floor for numpy"):
        script.floor("numpy", '"torch>=2"')


def test_all_tests_it_runs_are_there(script: Any) -> None:
    assert all((ROOT / path).is_file() for path in script.TESTS)


def test_a_failing_test_fails_the_cell(
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    good.write_text("def test_a(): pass\n")
    bad.write_text("def test_a(): assert False\n")
    said = f"| {torch.__version__} | {transformers.__version__} |"
    inside = ["--in", sys.executable]
    assert run_main(script, monkeypatch, *inside, str(good)) == 0
    assert f"{said} passed | 1 passed in" in capsys.readouterr().out
    assert run_main(script, monkeypatch, *inside, str(bad)) == 1
    assert f"{said} failed (pytest exit code 1) | 1 failed in" in capsys.readouterr().out


def test_a_cell_that_can_not_be_installed_is_no_success(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def refuse(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(list(map(str, command)))
        return subprocess.CompletedProcess(command, int("install-torch" in asked[-1][0]))

    monkeypatch.setattr(script.subprocess, "run", refuse)
    assert run_main(script, monkeypatch, "--cell", "2.6.0,5.24.0") == 1
    assert "|  | 2.6.0 | 5.24.0 | not installed | not run |" in capsys.readouterr().out
    assert asked[0][1:3] == ["-m", "venv"]
    assert asked[1][2:] == ["2.6.0"]
    assert run_main(script, monkeypatch, "--cell", "2.6.0,5.24.0", "--skip-missing") == 0
