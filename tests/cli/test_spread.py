"""Spreading the target over devices from the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from hf_specdec.cli.app import app
from hf_specdec.cli.options import DEMO, pair_settings
from hf_specdec.cli.pairs import load_pair
from hf_specdec.cli.processes import Processes
from hf_specdec.cli.spread import Spread, spread
from hf_specdec.modeling.placement import is_offloaded

NEW = 12
MAP = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"} | {
    "model.layers": "disk",
    "lm_head": "disk",
}


def generate(*arguments: Any) -> Result:
    return CliRunner().invoke(
        app,
        ["generate", *map(str, arguments), "--dtype", "float32", "--max-new-tokens", str(NEW)],
        env={"COLUMNS": "300", "NO_COLOR": "1"},
    )


def test_a_target_on_the_disk_says_what_it_says_in_memory(pair_folders, tmp_path: Path) -> None:
    target, drafter = pair_folders
    common = [target, "a cat", "the dog, or so", "--batch-size", 2]
    options = ["--device-map", json.dumps(MAP), "--offload-folder", tmp_path / "weights"]
    texts = []
    for name, more in (("plain", []), ("spread", ["--spec-model", drafter, *options])):
        output = tmp_path / name
        result = generate(*common, "--output", output, *more)
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        texts.append([row["text"] for row in rows])
    assert texts[0] == texts[1]
    assert all(row["speculation"]["num_drafts"] > 0 for row in rows)


def test_the_drafter_goes_where_the_target_ends(pair_folders, tmp_path: Path) -> None:
    target, drafter = pair_folders
    settings = pair_settings(
        str(target),
        spec_model=str(drafter),
        dtype="float32",
        spread=Spread(MAP, None, str(tmp_path)),
    )
    pair = load_pair(settings)
    assert is_offloaded(pair.target)
    assert pair.speculates


def test_limits_and_the_folder_reach_the_target(
    pair_folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit too small for the target sends the rest to the disk, into the folder."""
    asked: dict[str, Any] = {}
    load = AutoModelForCausalLM.from_pretrained

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.update(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    places = Spread("auto", {"cpu": 12_000}, str(tmp_path))
    pair = load_pair(pair_settings(str(pair_folders[0]), dtype="float32", spread=places))
    assert "disk" in set(pair.target.hf_device_map.values())
    assert asked["offload_folder"] == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_memory": "{}"}, "{} says nothing without --device-map: add --device-map auto"),
        ({"offload_folder": "x"}, "x says nothing without --device-map"),
        ({"device_map": "auto", "device": "cpu"}, "--device cpu wants it on one"),
        ({"device_map": "auto", "compiles": True}, "--compile wants it on one"),
        ({"device_map": "auto", "pack_weights": True}, "--pack-weights wants it on one"),
        ({"device_map": "evenly"}, "'evenly' must be one of auto, balanced, balanced_low_0"),
        ({"device_map": "[1]"}, "'[1]' must be one of auto"),
        ({"device_map": "auto", "max_memory": "20GiB"}, '\'20GiB\' must be {"0": "20GiB"'),
    ],
)
def test_options_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "device_map": None,
        "max_memory": None,
        "offload_folder": None,
        "device": "auto",
        "compiles": False,
        "pack_weights": False,
    }
    with pytest.raises(typer.BadParameter, match=re.escape(message)):
        spread(**{**values, **arguments})


def test_several_processes_do_not_spread_a_target_each(pair_folders, monkeypatch) -> None:
    """Refused before anything is loaded; on one device each may have its own."""
    monkeypatch.setattr(Processes, "of_launcher", lambda: Processes(1, 2, 1))
    message = "--device-map auto: each of 2 processes would spread a whole target"
    monkeypatch.setattr("hf_specdec.cli.generate.load_pair", lambda _: pytest.fail("loaded"))
    result = generate(pair_folders[0], "a cat", "--output", "x", "--device-map", "auto")
    assert result.exit_code == 1 and message in result.output
    with pytest.raises(ValueError, match=r"each of 2 processes"):
        Spread(MAP).check_processes(2)
    Spread(MAP).check_processes(1)
    Spread({"": "cpu"}).check_processes(2)
    Spread({"model": 0, "lm_head": 0}).check_processes(2)


def test_numbers_of_gpus_are_numbers() -> None:
    limits = '{"0": "20GiB", "cpu": "60GiB"}'
    found = spread("auto", limits, None, "auto", False, False)
    assert found is not None
    assert found.arguments() == {
        "device_map": "auto",
        "max_memory": {0: "20GiB", "cpu": "60GiB"},
    }


def test_the_demo_is_not_spread() -> None:
    with pytest.raises(typer.BadParameter, match="give a target of your own"):
        pair_settings(DEMO, spread=Spread("auto"))


def test_a_device_that_is_not_there(pair_folders) -> None:
    places = json.dumps({"": "cuda:99"})
    result = generate(pair_folders[0], "a", "--device-map", places)
    assert result.exit_code == 1
    assert "--device-map cuda:99: torch can't use it here" in result.output


@pytest.mark.parametrize("command", ["generate", "serve", "bench"])
def test_commands_that_spread_a_target(command: str, pair_folders) -> None:
    result = CliRunner().invoke(
        app,
        [command, str(pair_folders[0]), "--device-map", "evenly"],
        env={"COLUMNS": "300", "NO_COLOR": "1"},
    )
    assert result.exit_code == 2
    assert "'evenly' must be one of auto" in result.output
