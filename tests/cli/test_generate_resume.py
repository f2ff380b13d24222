"""An interrupted `generate` is continued by the same command."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hf_specdec.cli import generate as generate_module
from hf_specdec.cli.app import app
from hf_specdec.cli.processes import Processes
from hf_specdec.cli.results_file import ResultsFile

PROMPTS = ["a cat", "b", "the dog, or so", "xyz", "hello there", "one", "two"]
OPTIONS = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "10", "--batch-size", "2"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The prompts, and where the texts go."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return source, tmp_path / "out.jsonl"


def arguments_of(pair: tuple[Path, Path], files: tuple[Path, Path], *more: str) -> list[str]:
    target, drafter = map(str, pair)
    source, output = map(str, files)
    paths = ["--spec-model", drafter, "--input", source, "--output", output]
    return ["generate", target, *paths, *OPTIONS, *more]


def run(pair: tuple[Path, Path], files: tuple[Path, Path], *more: str) -> Result:
    result = CliRunner().invoke(app, arguments_of(pair, files, *more), env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def texts_of(path: Path) -> list[tuple[int, str]]:
    """Index and text of every row. Statistics may differ by the batch."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["index"], row["text"]) for row in rows]


@pytest.fixture
def expected(pair_folders: tuple[Path, Path], files: tuple[Path, Path]) -> list[tuple[int, str]]:
    source, output = files
    whole = output.with_name("whole.jsonl")
    run(pair_folders, (source, whole))
    return texts_of(whole)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the prompts that are run."""
    indices: list[int] = []
    original = generate_module.generate_batch

    def count(settings: Any, pair: Any, batch: Any, streamer: Any = None) -> Any:
        indices.extend(item.index for item, _ in batch)
        return original(settings, pair, batch, streamer)

    monkeypatch.setattr(generate_module, "generate_batch", count)
    return indices


def test_finished_prompts_are_not_run_again(
    pair_folders: Any, files: Any, expected: Any, asked: list[int]
) -> None:
    run(pair_folders, files)
    output = files[1]
    lines = output.read_bytes().splitlines(keepends=True)
    # Interrupted while the fourth row was being written.
    output.write_bytes(b"".join(lines[:3]) + lines[3][:25])
    asked.clear()
    result = run(pair_folders, files)
    assert result.exit_code == 0, result.output
    assert "3 of 7 prompts are done already" in result.output
    assert asked == [3, 4, 5, 6]
    assert texts_of(output) == expected
    asked.clear()
    before = output.read_bytes()
    run(pair_folders, files)
    assert (asked, output.read_bytes()) == ([], before)
    assert sorted(p.name for p in output.parent.iterdir() if p.name.startswith("out.")) == [
        "out.jsonl",
        "out.jsonl.settings.json",
    ]


def test_a_run_that_fails_keeps_what_is_finished(
    pair_folders: Any, files: Any, expected: Any, asked: list[int], monkeypatch: Any
) -> None:
    counting = generate_module.generate_batch

    def fail(settings: Any, pair: Any, batch: Any, streamer: Any = None) -> Any:
        if batch[0][0].index == 4:
            raise KeyboardInterrupt
        return counting(settings, pair, batch, streamer)

    with monkeypatch.context() as patch:
        patch.setattr(generate_module, "generate_batch", fail)
        assert run(pair_folders, files).exit_code != 0
    assert texts_of(files[1]) == expected[:4]
    asked.clear()
    run(pair_folders, files)
    assert asked == [4, 5, 6]
    assert texts_of(files[1]) == expected


def test_other_settings_are_refused(pair_folders: Any, files: Any, asked: list[int]) -> None:
    run(pair_folders, files)
    source, output = files
    before = output.read_bytes()
    asked.clear()
    for more, what in (
        (("--temperature", "1.0"), "temperature: None, now 1.0"),
        (("--spec-tokens", "1"), "speculative_config: "),
        (("--max-new-tokens", "11"), "max_new_tokens: 10, now 11"),
    ):
        result = run(pair_folders, files, *more)
        assert result.exit_code == 1
        assert "has rows made with other settings (" in result.output
        assert what in result.output
    source.write_text(source.read_text() + '{"prompt": "more"}\n')
    assert "prompts: " in run(pair_folders, files).output
    assert (asked, output.read_bytes()) == ([], before)
    # How the work is cut changes nothing.
    result = run(pair_folders, files, "--overwrite", "--batch-size", "3")
    assert result.exit_code == 0
    assert len(texts_of(output)) == 8


def test_a_file_of_another_program_is_not_touched(pair_folders: Any, files: Any) -> None:
    output = files[1]
    output.write_text("my notes\n")
    result = run(pair_folders, files)
    assert result.exit_code == 1
    assert "exists, but not out.jsonl.settings.json, which would say how it was made" in (
        result.output
    )
    assert output.read_text() == "my notes\n"
    result = run(pair_folders, (files[0], output.parent / "absent" / "out.jsonl"))
    assert "there is no folder" in result.output


def test_sigterm_keeps_what_is_finished(
    pair_folders: Any, files: Any, expected: Any, asked: list[int], monkeypatch: Any
) -> None:
    counting = generate_module.generate_batch
    before = signal.getsignal(signal.SIGTERM)

    def stop(settings: Any, pair: Any, batch: Any, streamer: Any = None) -> Any:
        if batch[0][0].index == 4:
            signal.raise_signal(signal.SIGTERM)
        return counting(settings, pair, batch, streamer)

    with monkeypatch.context() as patch:
        patch.setattr(generate_module, "generate_batch", stop)
        result = run(pair_folders, files)
    assert result.exit_code == 128 + signal.SIGTERM
    assert "4 of 7 texts are kept. Run the same command again to go on" in result.output
    assert signal.getsignal(signal.SIGTERM) == before
    run(pair_folders, files)
    assert asked == [0, 1, 2, 3, 4, 5, 6]
    assert texts_of(files[1]) == expected


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "out.jsonl")
    results.prepare({})
    results.path.write_text('{"index": 0}\nhello\n{"index": 1')
    with pytest.raises(ValueError, match=r"out\.jsonl, line 2 is not a row of results"):
        results.prepare({})


def test_parts_of_any_number_of_processes_are_joined_in_order(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "out.jsonl")
    results.prepare({"a": 1})
    for part, indices in ((0, [0, 3]), (1, [1]), (2, [2, 5])):
        with results.append(part) as write:
            for index in indices:
                write({"index": index, "part": part})
    with open(tmp_path / "out.jsonl.part-001", "a") as file:
        file.write('{"index": 4, "pa')
    with results.append() as write:
        write({"index": 3, "part": None})  # the one that was there first stays
    results.prepare({"a": 1})
    rows = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert [(row["index"], row["part"]) for row in rows] == [
        (0, 0), (1, 1), (2, 2), (3, None), (5, 2),
    ]  # fmt: skip
    assert results.finished() == {0, 1, 2, 3, 5}
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_shares_differ_by_one_at_most() -> None:
    shares = [Processes(rank, 3).share(range(7)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]


def test_several_processes_need_a_file(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "of_launcher", lambda: Processes(0, 2))
    result = CliRunner().invoke(app, ["generate", str(pair_folders[0]), "a"])
    assert result.exit_code == 1
    assert "2 processes share the prompts; name the file" in result.output
