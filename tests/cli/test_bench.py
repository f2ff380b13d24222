"""`hf-specdec bench` on a tiny pair, through its real entry point."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_calls import Graphs
from transformers import CompileConfig
from typer.testing import CliRunner, Result

from hf_specdec import decoding
from hf_specdec.benchmarking import calls
from hf_specdec.benchmarking.calls import Calls
from hf_specdec.cli.app import app
from hf_specdec.cli.list_options import repeat_names
from hf_specdec.targets.packing import PackedLinear
from hf_specdec.verification import Verdict

Folders = tuple[Path, Path]
QUICK = ("--max-new-tokens", "8", "--repeats", "1", "--limit", "2")


def bench(*arguments: object) -> Result:
    words = ["bench", *(str(argument) for argument in arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def one_line(text: str) -> str:
    """The text without the frame and the line breaks that typer puts around messages."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def pair(pair_folders: Folders) -> tuple[object, ...]:
    """The arguments that name the tiny pair."""
    target, drafter = pair_folders
    return target, "--spec-model", drafter


def test_sweep_is_shown_written_and_drawn(pair, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    result = bench(
        *pair, *QUICK, "--k", 1, 2, "--batch", 1, 2, "--set", "maths", "code",
        "--json", numbers, "--plot", picture,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(numbers.read_text())
    places = [(row["prompt_set"], row["batch"], row["k"]) for row in content["rows"]]
    assert places == [
        (name, batch, k) for batch in (1, 2) for name in ("maths", "code") for k in (1, 2)
    ]
    assert all(row["identical"] == row["texts"] == 2 for row in content["rows"])
    assert all(len(row["per_position"]) == row["k"] for row in content["rows"])
    assert content["environment"]["dtype"] == "float32"
    assert content["settings"]["target"] == str(pair[0])
    assert content["settings"]["drafter"] == str(pair[2])
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Each row is in three tables; the line about the least speed-up names one of them.
    tables = [line for line in result.output.splitlines() if "least speed-up" not in line]
    assert "\n".join(tables).count("maths") == 3 * 4
    assert len(tables) < len(result.output.splitlines())
    assert f"torch {torch.__version__}" in one_line(result.output)


def test_plain_runs_keep_their_weights_as_they_were(pair, tmp_path, monkeypatch) -> None:
    numbers, packed_calls = tmp_path / "bench.json", []
    forward, plain = PackedLinear.forward, Calls.plain

    def count(*args):
        packed_calls.append(1)
        return forward(*args)

    def watched(self, *args):
        before = len(packed_calls)
        sequences = plain(self, *args)
        assert len(packed_calls) == before
        return sequences

    monkeypatch.setattr(PackedLinear, "forward", count)
    monkeypatch.setattr(Calls, "plain", watched)
    result = bench(
        *pair, *QUICK, "--set", "chat", "--k", 0, 2, "auto", "--pack-weights", "--json", numbers,
        "--plot", tmp_path / "bench.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert packed_calls
    content = json.loads(numbers.read_text())
    assert [row["k"] for row in content["rows"]] == [0, 2, "auto"]
    assert content["settings"]["pack_weights"] == "in speculative runs"


def test_runs_with_a_drafter_are_compiled(pair, tmp_path, monkeypatch) -> None:
    numbers, graphs = tmp_path / "bench.json", Graphs()
    config = CompileConfig(backend=graphs, fullgraph=True)
    monkeypatch.setattr(calls, "CompileConfig", lambda: config)
    result = bench(*pair, *QUICK, "--set", "chat", "--k", 2, "--compile", "--json", numbers)
    assert result.exit_code == 0, result.output
    # The target's forward, and the drafter's chain.
    assert len(graphs) == 2
    assert json.loads(numbers.read_text())["settings"]["compile"] == "in speculative runs"


def test_chains_and_trees_are_compared(pair, tmp_path: Path) -> None:
    numbers = tmp_path / "bench.json"
    result = bench(
        *pair, *QUICK, "--set", "chat", "--k", 0, 2, "--tree-nodes", 0, 5, "--json", numbers,
        "--plot", tmp_path / "bench.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(numbers.read_text())["rows"]
    # Without drafts there is no tree.
    assert [(row["k"], row["tree_nodes"]) for row in rows] == [(0, 0), (2, 0), (2, 5)]
    assert all(row["identical"] == row["texts"] == 2 for row in rows)
    assert "2/5" in result.output and "2/0" in result.output
    # What the drafter does for a tree is its time, not the loop's.
    assert rows[2]["drafter_step"] > 0.2 * rows[1]["drafter_step"]
    markdown = bench(*pair, *QUICK, "--set", "chat", "--k", 2, "--tree-nodes", 5, "--markdown")
    assert markdown.stdout.startswith("| prompts | batch | plain | K = 2, tree of 5 |")


def test_lookups_are_measured_with_the_drafter(pair, tmp_path: Path) -> None:
    rows = []
    for name, options in (("without", ()), ("with", ("--prompt-lookup", 6))):
        numbers = tmp_path / f"{name}.json"
        result = bench(*pair, *QUICK, "--set", "chat", "--k", 2, *options, "--json", numbers)
        assert result.exit_code == 0, result.output
        report = json.loads(numbers.read_text())
        assert report["settings"].get("prompt_lookup_num_tokens") == (6 if options else None)
        assert all(row["identical"] == row["texts"] for row in report["rows"])
        rows += report["rows"]
    # The tiny target repeats itself.
    assert len(rows[1]["per_position"]) > len(rows[0]["per_position"])
    result = bench(pair[0], "--synthetic-acceptance", 1, "--k", 2, "--prompt-lookup", 6)
    assert result.exit_code == 2


def test_trees_of_the_config(pair, tmp_path: Path) -> None:
    numbers = tmp_path / "bench.json"
    words = (*pair, *QUICK, "--set", "chat", "--json", numbers, "--speculative-config")
    result = bench(*words, json.dumps({"num_tree_nodes": 4}))
    assert result.exit_code == 0, result.output
    assert [row["tree_nodes"] for row in json.loads(numbers.read_text())["rows"]] == [4]
    for config, options, said in (
        ({"num_tree_nodes": 4}, ("--tree-nodes", 2), "num_tree_nodes is 4 in the speculative"),
        ({"speculative_token_tree": "checkpoint"}, (), "compare trees by their number of nodes"),
    ):
        result = bench(*words, json.dumps(config), *options)
        assert result.exit_code == 2
        assert said in one_line(result.output)
    target = pair[0]
    result = bench(target, "--synthetic-acceptance", 1, "--k", 2, "--tree-nodes", 3)
    assert result.exit_code == 2
    assert "a synthetic drafter drafts chains" in one_line(result.output)


def test_own_prompts_the_drafters_k_and_markdown(pair, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("how are you\n\nwhat is this\n")
    result = bench(*pair, *QUICK, "--prompts", prompts, "--markdown")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| prompts | batch | plain | K = 3 |")
    assert lines[2].startswith("| mine.txt | 1 | ")
    assert lines[2].endswith("| 2 / 0 / 0 |")
    assert len(lines) == 5


def test_config_gives_k_and_a_schedule(pair, tmp_path: Path) -> None:
    numbers = tmp_path / "bench.json"
    config = {"num_speculative_tokens": 2, "num-speculative-tokens-per-batch-size": [[1, 8, 1]]}
    result = bench(
        *pair, *QUICK, "--set", "chat", "--speculative-config", json.dumps(config),
        "--json", numbers,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(numbers.read_text())
    assert content["settings"]["num_speculative_tokens_per_batch_size"] == [[1, 8, 1]]
    (row,) = content["rows"]
    assert row["k"] == 2
    assert len(row["per_position"]) == 1


def test_synthetic_drafter_needs_no_other(pair_folders: Folders, tmp_path: Path) -> None:
    numbers = tmp_path / "bench.json"
    result = bench(
        pair_folders[0], "--synthetic-acceptance", 1, "--synthetic-draft-cost", 0.01, "--k", 5,
        "--set", "chat", "--limit", 1, "--max-new-tokens", 61, "--repeats", 1, "--json", numbers,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(numbers.read_text())
    (row,) = content["rows"]
    assert row["per_position"] == [1.0] * 5
    assert row["mean_acceptance_length"] == 6.0
    assert content["settings"]["drafter"] == "synthetic"
    assert content["settings"]["acceptance"] == 1.0
    assert content["settings"]["draft_milliseconds"] == pytest.approx(0.01)


def test_seed_and_threads_are_the_options(pair_folders: Folders, tmp_path: Path) -> None:
    numbers = tmp_path / "bench.json"
    threads = torch.get_num_threads()
    found = []
    torch.set_num_threads(2)
    try:
        for seed in (1, 2):
            result = bench(
                pair_folders[0], "--synthetic-acceptance", 0.5, "--k", 3, "--set", "chat",
                "--limit", 1, "--max-new-tokens", 40, "--repeats", 1, "--seed", seed,
                "--threads", 1, "--json", numbers,
            )  # fmt: skip
            assert result.exit_code == 0, result.output
            content = json.loads(numbers.read_text())
            assert content["environment"]["threads"] == 1
            found.append(content["rows"][0]["per_position"])
    finally:
        torch.set_num_threads(threads)
    assert found[0] != found[1]


def test_plain_steps_of_the_loop_can_be_measured(pair, tmp_path: Path) -> None:
    """K = 0 drafts nothing; a draft's numbers are empty then, and the picture is still drawn."""
    picture = tmp_path / "bench.png"
    result = bench(*pair, *QUICK, "--k", 0, 2, "--set", "chat", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.exists()


def test_wrong_text_fails_the_command(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a verifier that takes every draft."""

    def take_all(draft_ids: torch.Tensor, scores: torch.Tensor, *_: Any) -> Verdict:
        tokens = torch.cat([draft_ids, scores.argmax(dim=-1)[:, -1:]], dim=1)
        return Verdict(tokens, torch.full((len(tokens),), draft_ids.shape[1]))

    monkeypatch.setattr(decoding, "verify_match", take_all)
    result = bench(*pair, *QUICK, "--set", "chat")
    assert result.exit_code == 1
    assert "2 texts are not the target's own" in result.output
    assert "NOT a near-tie: an error" in result.output
    assert "0/0/2" in result.output


def test_python_m_runs_it(pair) -> None:
    words = [str(word) for word in (*pair, *QUICK, "--set", "chat", "--markdown")]
    result = subprocess.run(
        [sys.executable, "-m", "hf_specdec", "bench", *words], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    # Progress is not in the way of a table that is written to a file.
    assert result.stdout.startswith("| prompts |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", 9), "--k=9 must be an integer from 0 to 3"),
        (("--set", "chat", "poems"), "'poems' is no built-in prompt set; choose from ['general',"),
        (("--k", 2, "--spec-tokens", 2), "K is 2 in the speculative config already"),
        (("--k", "two"), "Invalid value for '--k'"),
        (("--batch", 0), "Invalid value for '--batch'"),
        (("--synthetic-acceptance", 0.5), "it drafts in place of a real drafter"),
        (("--synthetic-acceptance", 1.5), "Invalid value for '--synthetic-acceptance'"),
        (("--prompts", "absent.txt"), "'absent.txt' does not exist"),
        (("--json", "absent/bench.json"), "there is no folder"),
        (("--plot", "absent/bench.png"), "there is no folder"),
        (("--plot", "bench.gif"), "must end in one of ['.png', '.pdf', '.svg']"),
        (("--device", "nonsense"), "--device nonsense: torch can't use it here"),
    ],
)
def test_what_makes_no_sense_is_refused(pair, arguments: tuple[object, ...], message: str) -> None:
    result = bench(*pair, *QUICK, *arguments)
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert message in one_line(result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "has no drafter to measure: name one with --spec-model"),
        (("--synthetic-acceptance", 0.5), "a synthetic drafter has no K of its own"),
    ],
)
def test_target_alone_needs_something_to_measure(
    pair_folders: Folders, arguments: tuple[object, ...], message: str
) -> None:
    result = bench(pair_folders[0], *QUICK, *arguments)
    assert result.exit_code == 2
    assert message in one_line(result.output)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", "has no prompt in it"), (b"\xff\xfe\x00\x81", "is not a text in UTF-8")],
)
def test_file_without_prompts_is_refused(
    pair, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    result = bench(*pair, "--prompts", path)
    assert result.exit_code == 2
    assert message in one_line(result.output)


def test_matplotlib_matters_for_the_picture_alone(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "hf_specdec.cli.bench.importlib.util.find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = bench(*pair, *QUICK, "--plot", "bench.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in one_line(result.output)
    assert bench(*pair, *QUICK, "--set", "chat").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("demo --k 1 2 --batch 8", "demo --k 1 --k 2 --batch 8"),
        ("demo --k 1 2 --repeats 3", "demo --k 1 --k 2 --repeats 3"),
        ("demo --k 1 --k 2", "demo --k 1 --k 2"),
        ("demo --k=1 --repeats 3", "demo --k=1 --repeats 3"),
        ("demo --k 1 -- 2", "demo --k 1 -- 2"),
        ("demo --repeats 3 4", "demo --repeats 3 4"),
    ],
)
def test_list_options_take_values_up_to_the_next_option(arguments: str, expected: str) -> None:
    assert repeat_names(arguments.split(), {"--k", "--batch"}) == expected.split()
