"""`hf-specdec serve`: what is refused before a model is loaded. What it serves: tests/serving."""

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_specdec.cli.app import app


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_a_target_without_a_drafter():
    message = refused("some/target")
    assert "no drafter for some/target: name one with --spec-model" in message


def test_packages_that_are_missing(monkeypatch):
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name in ("fastapi", "uvicorn") else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    message = refused("some/target", "--spec-model", "some/drafter")
    assert "not installed (fastapi, uvicorn)" in message
    assert 'pip install "hf-specdec[serving]"' in message


def test_a_prefix_that_is_no_name():
    message = refused("some/target", "--spec-model", "x", "--metrics-prefix", "my-server")
    assert "--metrics-prefix 'my-server' must consist of letters" in message


def test_an_address_that_is_taken_or_not_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused("x", "--spec-model", "y", "--host", "127.0.0.1", "--port", port)
        assert f"--host 127.0.0.1 --port {port}: can't listen there" in message
    for host in ("192.0.2.1", "no.such.host.invalid"):
        message = refused("x", "--spec-model", "y", "--host", host)
        assert f"--host {host} --port 8000: can't listen there" in message


@pytest.mark.parametrize("text", ["{", "[]", "5"])
def test_template_kwargs_that_are_no_object(text: str):
    arguments = ["serve", "x", "--spec-model", "y", "--chat-template-kwargs", text]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "JSON" in result.output


def test_template_kwargs_that_are_the_servers(pair_folders: tuple[Path, Path]):
    target, drafter = map(str, pair_folders)
    message = refused(
        target, "--spec-model", drafter, "--chat-template-kwargs", '{"tokenize": true}'
    )
    assert "--chat-template-kwargs has ['tokenize'], which the server sets itself" in message


def test_more_positions_than_there_are(pair_folders: tuple[Path, Path]):
    target, drafter = map(str, pair_folders)
    message = refused(target, "--spec-model", drafter, "--max-model-len", "257")
    assert "--max-model-len 257: the model has 256 positions" in message


@pytest.mark.parametrize("drafter", ["no/such/folder", "target"])
def test_a_drafter_that_isnt_one(drafter: str, pair_folders: tuple[Path, Path]):
    target = str(pair_folders[0])
    message = refused(target, "--spec-model", target + "-" if drafter != "target" else target)
    assert "speculative_config" in message
