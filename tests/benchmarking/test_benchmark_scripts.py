"""The scripts in benchmarks/ run: nothing else would notice that they no longer do."""

import contextlib
import importlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec

FOLDER = Path(__file__).parents[2] / "benchmarks"
# Those that are run by themselves.
SCRIPTS = sorted(
    file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")
)
TRANSFORMERS = "transformers, assisted"
OWN_MODULES = {file.stem for file in FOLDER.glob("*.py")}


@pytest.fixture
def benchmark(monkeypatch):
    """``benchmark(name, *arguments)`` runs a script as its own process would; its output."""
    monkeypatch.syspath_prepend(FOLDER)
    loaded = OWN_MODULES - sys.modules.keys()

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return output.getvalue()

    yield run
    hf_specdec.enable()
    for name in loaded & sys.modules.keys():
        del sys.modules[name]


def numbers(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))["numbers"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_how_it_is_called(benchmark, name: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        benchmark(name, "--help")
    assert end.value.code == 0


def test_versus_transformers(benchmark, tmp_path: Path) -> None:
    file, picture = tmp_path / "versus.json", tmp_path / "versus.png"
    printed = benchmark(
        "versus_transformers",
        *("--sections", "draft", "mtp", "gemma4", "--limit", "2", "--new-tokens", "20"),
        *("--layers", "2", "--hidden", "64", "--vocabulary", "512", "--dtype", "float32"),
        *("--mtp-hidden", "32", "--mtp-layers", "2", "--mtp-experts", "4", "--mtp-steps", "0"),
        *("--json", str(file), "--plot", str(picture), "--markdown"),
    )
    rows = numbers(file)
    assert {row["section"] for row in rows} == {"draft", "mtp", "gemma4"}
    # In float32 every way gives the same text.
    assert all((row["identical"], row["wrong"]) == (2, 0) for row in rows)
    by_way = {(row["section"], row["way"]): row for row in rows}
    # The same drafter proposes the same in both loops.
    theirs, ours = by_way["gemma4", "same drafter, K=3"], by_way["gemma4", "Gemma 4 assistant, K=3"]
    assert theirs["tokens_per_forward"] == pytest.approx(ours["tokens_per_forward"], rel=0.2)
    assert ours["tokens_per_forward"] > 1.2
    assert by_way["draft", "the draft model as a drafter, K=3"]["tokens_per_forward"] > 1.2
    assert theirs["ours_ahead"] and not ours["ours_ahead"]
    assert "| gemma4 | plain generate |" in printed
    assert picture.stat().st_size > 1000


def test_the_ways_of_the_demo(benchmark, monkeypatch, target, make_speculator, prompts) -> None:
    """Prompt lookup, a draft model and early exit, on a tiny Llama."""
    versus = importlib.import_module("versus_transformers")
    paired = importlib.import_module("paired")
    texts = torch.randint(3, 60, (8, 24), generator=torch.Generator().manual_seed(1))
    draft = versus.fitted_draft_model(target, 2, texts)
    # Its first layers are the target's own, and the fitted head beats the target's behind them.
    assert draft.model.layers[1] is target.model.layers[1]
    ways = versus.demo_ways(target, make_speculator(n_predict=2), draft, early_exit=2)
    results = paired.measure(target, ways, [prompts(1)], 16, repeats=1)
    assert [result.identical for result in results] == [1] * len(ways)
    assert [way.name for way in ways if way.whose == "hf_specdec"] == [
        f"MLP speculator, K={k}" for k in (1, 2, "auto")
    ]
    rows = paired.rows_of("demo", results)
    assert sum(row["ours_ahead"] is not None for row in rows) == 5


def test_a_draft_model_drafts_what_it_would_say(benchmark, target, prompts) -> None:
    """Whatever was rejected before: its cache holds nothing else."""
    module = importlib.import_module("draft_model")
    texts = torch.randint(3, 60, (16, 24), generator=torch.Generator().manual_seed(1))
    model, drafts = module.fitted_draft_model(target, 3, texts), []

    class Watched(module.DraftModelDrafter):  # type: ignore[name-defined, misc]
        def propose(self, token_ids, num_draft_tokens, pick=None):
            draft = super().propose(token_ids, num_draft_tokens, pick)
            drafts.append((self._known + 1, draft[0].tolist()))
            return draft

    output = target.generate(
        **prompts(1), max_new_tokens=40, do_sample=False, assistant_model=Watched(model, 3)
    )
    plain = target.generate(**prompts(1), max_new_tokens=40, do_sample=False)
    assert torch.equal(output, plain)
    for count, draft in drafts:
        ids = plain[:, :count]
        said = model.generate(ids, max_new_tokens=len(draft), do_sample=False)
        assert said[0, count:].tolist() == draft
    rejected = [a for a, b in zip(drafts, drafts[1:], strict=False) if b[0] - a[0] < 4]
    assert len(rejected) > 3


def test_a_fitted_head_agrees_with_the_target_more_often(benchmark, target) -> None:
    fitted = importlib.import_module("draft_model").fitted_draft_model
    generator = torch.Generator().manual_seed(2)
    texts, held_out = torch.randint(3, 60, (2, 64, 24), generator=generator)
    expected = target(held_out).logits.argmax(-1)
    translated = fitted(target, 3, texts)
    bare = fitted(target, 3, texts)
    bare.model.norm, bare.lm_head = target.model.norm, target.lm_head
    agreement = [
        float((model(held_out).logits.argmax(-1) == expected).float().mean())
        for model in (translated, bare)
    ]
    assert agreement[0] > agreement[1] + 0.05


def test_long_context(benchmark, tmp_path: Path) -> None:
    file, picture = tmp_path / "long.json", tmp_path / "long.png"
    benchmark(
        "long_context",
        *("--shape", "tiny", "--dtype", "float32", "--context", "32", "256", "--batch", "1", "2"),
        *("--k", "2", "--steps", "4", "--rounds", "1", "--json", str(file), "--plot", str(picture)),
    )
    found = numbers(file)
    copied = {
        (row["batch"], row["context"], row["way"]): sum(row["copied_bytes"].values())
        for row in found["rows"]
    }
    keys = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    for context in (32, 256):
        assert copied[1, context, "hf_specdec"] == copied[2, context, "hf_specdec"] == 0
        assert copied[1, context, "plain generate"] >= context * keys
        assert copied[1, context, TRANSFORMERS] >= context * keys
    assert (2, 32, TRANSFORMERS) not in copied
    lengths = {
        (row["batch"], row["context"], row["way"]): row["tokens_per_step"] for row in found["rows"]
    }
    for context in (32, 256):
        # One drafter, one text: both loops accept the same drafts, up to the last one's length.
        ours, theirs = lengths[1, context, "hf_specdec"], lengths[1, context, TRANSFORMERS]
        assert ours > 1.5
        assert theirs == pytest.approx(ours, rel=0.15)
    assert {line["to"] for line in found["growth"]} == {256}
    assert picture.stat().st_size > 1000


def test_loop_overhead(benchmark, tmp_path: Path) -> None:
    file, picture = tmp_path / "overhead.json", tmp_path / "overhead.png"
    benchmark(
        "loop_overhead",
        *("--models", "tiny", "--dtype", "float32", "--batch", "1", "2", "--steps", "4"),
        *("--rounds", "1", "--json", str(file), "--plot", str(picture)),
    )
    rows = numbers(file)
    assert [row["batch"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["share"] < 1
        operators = {operator["operator"]: operator["calls"] for operator in row["operators"]}
        # What the loop does, and nothing of the networks.
        assert operators["aten::cat"] >= 1
        assert not {"aten::mm", "aten::linear", "aten::embedding"} & operators.keys()
    assert picture.stat().st_size > 1000


def test_offload(benchmark, tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    printed = benchmark(
        "offload",
        *("--model", "tiny", "--k", "2", "--prompts", "2", "--new-tokens", "6"),
        *("--json", str(file), "--markdown"),
    )
    rows = numbers(file)
    assert [row["section"] for row in rows] == ["in memory"] * 2 + ["layers on disk"] * 2
    assert [row["identical"] for row in rows] == [2] * 4
    # Where the weights are changes no draft.
    assert [row["forwards"] for row in rows[:2]] == [row["forwards"] for row in rows[2:]]
    assert rows[0]["forwards"] == rows[0]["tokens"] == 12
    assert "| layers on disk | with drafts, K=2 |" in printed
