"""The options that name a pair: one config of JSON and shortcuts, loaded once, or refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from compiled_calls import Graphs
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli import options, pairs
from hf_specdec.cli.app import CommandLine
from hf_specdec.cli.demo_pair import DRAFTER_DIRECTORY, DemoPair
from hf_specdec.cli.options import DEMO, PairSettings, pair_settings
from hf_specdec.cli.pairs import choose_device, load_pair
from hf_specdec.integration import ATTACHED
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.targets.packing import PackedLinear


def test_json_and_shortcuts_make_one_config() -> None:
    json = '{"method": "mlp_speculator", "num-speculative-tokens": 3}'
    settings = pair_settings("target", json, spec_model="drafter", spec_tokens=3)
    assert settings.speculative_config == SpeculativeConfig("mlp_speculator", "drafter", 3)
    shortcuts = pair_settings(
        "target", spec_method="mlp_speculator", spec_model="drafter", spec_tokens=3
    )
    assert shortcuts == settings
    assert settings.as_json() == {
        "target": "target",
        "speculative_config": {
            "method": "mlp_speculator",
            "model": "drafter",
            "num_speculative_tokens": 3,
            "verification": "match",
        },
        "dtype": "auto",
    }


def test_without_options_a_target_runs_alone() -> None:
    assert pair_settings("target").speculative_config is None
    assert pair_settings("target").as_json()["speculative_config"] is None
    # An empty config is vLLM's way, too, to ask for the target's own layers.
    assert pair_settings("target", "{}").speculative_config == SpeculativeConfig()
    assert pair_settings("target", spec_tokens=0).speculative_config is not None


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("3", 3), ("auto", "auto"), ("-1", None), ("many", None)]
)
def test_draft_tokens_are_a_number_or_auto(text: str, expected: int | str | None) -> None:
    line = CommandLine()
    seen = []

    @line.command()
    def command(spec_tokens: options.SpecTokens = None) -> None:
        seen.append(pair_settings("target", spec_tokens=spec_tokens).speculative_config)

    result = CliRunner().invoke(line, ["--spec-tokens", text], env={"COLUMNS": "200"})
    if expected is None:
        assert result.exit_code == 2
        assert f"{text} must be an integer of at least 0, or auto" in result.output
    else:
        assert [config and config.num_speculative_tokens for config in seen] == [expected]
    assert CliRunner().invoke(line, []).exit_code == 0
    assert seen[-1] is None


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ({"target": DEMO}, str(DRAFTER_DIRECTORY)),
        ({"target": DEMO, "spec_tokens": 2}, str(DRAFTER_DIRECTORY)),
        ({"target": DEMO, "spec_method": "mlp_speculator"}, str(DRAFTER_DIRECTORY)),
        ({"target": DEMO, "spec_method": "mtp"}, None),
        ({"target": DEMO, "spec_model": "other"}, "other"),
        ({"target": "target", "spec_model": DEMO}, str(DRAFTER_DIRECTORY)),
    ],
)
def test_demo_stands_for_the_demo_pair(arguments: dict[str, Any], model: str | None) -> None:
    config = pair_settings(**arguments).speculative_config
    assert config is not None
    assert config.model == model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_config": "{method: mtp}"}, "is not JSON .*quote it for the shell"),
        ({"speculative_config": "[1]"}, "must be a dict"),
        ({"speculative_config": '{"metod": "mtp"}'}, "Did you mean 'method' by 'metod'"),
        ({"spec_method": "eagle3"}, "no drafter for it is here"),
        (
            {"speculative_config": '{"method": "mtp"}', "spec_method": "mlp_speculator"},
            "--spec-method mlp_speculator and --speculative-config with method='mtp' contradict",
        ),
        (
            {"speculative_config": '{"num_speculative_tokens": 2}', "spec_tokens": 3},
            "--spec-tokens 3 and --speculative-config with num_speculative_tokens=2 contradict",
        ),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        pair_settings("target", **arguments)


def test_a_pair_is_loaded_and_attached(pair_folders: tuple[Path, Path]) -> None:
    target, drafter = map(str, pair_folders)
    pair = load_pair(pair_settings(target, spec_model=drafter, spec_tokens=2, dtype="float32"))
    assert pair.speculates
    assert pair.target.dtype == torch.float32
    assert not pair.target.training
    batch = pair.tokenizer(["a b c", "d"], return_tensors="pt", padding=True)
    assert batch["attention_mask"][1].tolist() == [0, 0, 0, 0, 1]
    plain = load_pair(PairSettings(target))
    assert not plain.speculates
    expected = plain.target.generate(**batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(pair.target.generate(**batch, max_new_tokens=8, do_sample=False), expected)
    assert hf_specdec.speculation_totals(pair.target).snapshot().num_new_tokens == 16
    with pytest.raises(ValueError, match="nothing is attached to this LlamaForCausalLM"):
        hf_specdec.speculation_totals(plain.target)


def test_both_models_of_a_pair_are_packed(pair_folders: tuple[Path, Path]) -> None:
    target, drafter = map(str, pair_folders)
    pair = load_pair(pair_settings(target, spec_model=drafter, pack_weights=True))
    for model in (pair.target, pair.target.__dict__[ATTACHED].assistant):
        linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
        assert linear
        assert {type(layer) for layer in linear} == {PackedLinear}
    with pytest.raises(ValueError, match="--pack-weights: model has .*bfloat16 and float32"):
        load_pair(pair_settings(target, dtype="float16", pack_weights=True))


def test_steps_are_compiled_if_there_are_any(pair_folders: tuple[Path, Path]) -> None:
    target, drafter = map(str, pair_folders)
    pair = load_pair(pair_settings(target, spec_model=drafter, compiles=True))
    config = pair.target.generation_config
    assert config.cache_implementation == "static"
    batch = pair.tokenizer(["a b c"], return_tensors="pt")
    graphs = Graphs()
    config.compile_config.backend = graphs
    # As the server calls it, too.
    for generation_config in (None, copy.deepcopy(config)):
        ours = pair.target.generate(
            **batch, max_new_tokens=8, do_sample=False, generation_config=generation_config
        )
        plain = load_pair(PairSettings(target)).target
        assert torch.equal(ours, plain.generate(**batch, max_new_tokens=8, do_sample=False))
    # The target's forward, and the drafter's chain.
    assert len(graphs) == 2
    with pytest.raises(typer.BadParameter, match="compiles the steps of speculation, and target"):
        pair_settings("target", compiles=True)


def test_the_demo_pair_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch, target: Any, make_speculator: Any, byte_tokenizer: Any
) -> None:
    demo = DemoPair(byte_tokenizer, target, make_speculator())
    seen = []

    def load(dtype: torch.dtype, device: torch.device) -> DemoPair:
        seen.append(dtype)
        return demo

    monkeypatch.setattr(pairs, "load_demo_pair", load)
    attached = []
    monkeypatch.setattr(pairs, "attach", lambda target, config: attached.append(config.model))
    monkeypatch.setattr("hf_specdec.targets.slow_dtypes.has_kernels_for", lambda _: True)
    load_pair(pair_settings(DEMO, device="cpu"))
    load_pair(pair_settings(DEMO, device="cpu", dtype="float32"))
    assert seen == [torch.bfloat16, torch.float32]
    assert attached == [demo.drafter] * 2


@pytest.mark.parametrize("device", ["nvidia", "cuda:99", "nonsense:1"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"--device {device}: torch can't use it here"):
        choose_device(device)


def test_auto_is_a_device_of_this_machine() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_tree_nodes_are_a_field_of_the_config() -> None:
    config = pair_settings(DEMO, tree_nodes=6).speculative_config
    assert config is not None and config.num_tree_nodes == 6
    with pytest.raises(typer.BadParameter, match="--tree-nodes 6 and .*num_tree_nodes=4"):
        pair_settings(DEMO, '{"num_tree_nodes": 4}', tree_nodes=6)
