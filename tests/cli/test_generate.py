"""`generate` through the command: the target's own texts, in order, from every source."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tiny_pairs import TEMPLATE, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from hf_specdec.cli import generate as generate_module
from hf_specdec.cli.app import app
from hf_specdec.cli.prompt_files import items_of, split_lines
from hf_specdec.cli.streaming import ACCEPTED_STYLE

PROMPTS = ["a cat", "b", "the dog, or so", "xyz", "hello there"]
NEW = 16


def run(*arguments: Any, stdin: str | None = None) -> Result:
    options = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", str(NEW)]
    return CliRunner().invoke(
        app,
        ["generate", *map(str, arguments), *options],
        input=stdin,
        env={"COLUMNS": "300", "NO_COLOR": "1"},
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_texts(folder: Path, texts: list[str]) -> list[str]:
    """What the target alone says, one prompt at a time, by plain ``generate``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers: list[Any] = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        answers.append(
            tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return answers


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "id": 7}) + "\n" for p in PROMPTS))
    return path


@pytest.fixture
def chat_target(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(pair_folders[0], folder)
    make_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("speculates", [False, True])
def test_saved_texts_are_the_targets_own_in_order(
    pair_folders: tuple[Path, Path],
    input_file: Path,
    tmp_path: Path,
    batch_size: int,
    speculates: bool,
) -> None:
    target, drafter = pair_folders
    speculation = ["--spec-model", drafter, "--spec-tokens", 2] if speculates else []
    output = tmp_path / "out.jsonl"
    result = run(
        target, "--input", input_file, "--output", output, "--batch-size", batch_size, *speculation
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(output)
    assert [row["index"] for row in rows] == list(range(len(PROMPTS)))
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["text"] for row in rows] == plain_texts(target, PROMPTS)
    assert [row["num_prompt_tokens"] for row in rows] == [len(prompt) for prompt in PROMPTS]
    for row in rows:
        assert ("speculation" in row) is speculates
        assert row["finish_reason"] == ("length" if row["num_new_tokens"] == NEW else "stop")
        if speculates:
            counts = row["speculation"]
            assert len(counts["accepted_per_position"]) == 2
            assert sum(counts["accepted_per_position"]) == counts["num_accepted_tokens"]
            # One token of the prefill, one bonus token a draft, and a last step on its own.
            drafted = counts["num_drafts"] + counts["num_accepted_tokens"]
            assert abs(row["num_new_tokens"] - 1 - drafted) <= 1


def test_sampled_texts_depend_on_seeds_alone(
    pair_folders: tuple[Path, Path], input_file: Path, tmp_path: Path
) -> None:
    target, drafter = pair_folders
    texts = []
    for i, options in enumerate(
        [
            ("--batch-size", 1, "--spec-model", drafter),
            ("--batch-size", 3, "--spec-model", drafter, "--spec-tokens", 1),
            ("--batch-size", 5),
            ("--batch-size", 5, "--seed", 1),
        ]
    ):
        output = tmp_path / f"{i}.jsonl"
        result = run(
            target, "--input", input_file, "--output", output, "--temperature", 0.8, *options
        )
        assert result.exit_code == 0, result.output
        texts.append([row["text"] for row in rows_of(output)])
    assert texts[0] == texts[1] == texts[2]
    # Seeds 1, 2, ... in place of 0, 1, ...
    assert [row["seed"] for row in rows_of(tmp_path / "3.jsonl")] == [1, 2, 3, 4, 5]
    assert texts[3] != texts[0]
    assert texts[0] != plain_texts(target, PROMPTS)


def test_a_prompt_may_have_its_own_seed(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "seed": 5}\n{"prompt": "a"}\n{"prompt": "a", "seed": 5}\n')
    run(pair_folders[0], "--input", source, "--output", output, "--top-k", 40, "--batch-size", 3)
    first, second, third = rows_of(output)
    assert [row["seed"] for row in (first, second, third)] == [5, 1, 5]
    assert first["text"] == third["text"] != second["text"]


def test_prompts_come_from_arguments_lines_and_other_fields(
    pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = pair_folders
    expected = plain_texts(target, ["a cat", "b"])
    speculation = ["--spec-model", drafter]
    lines = "a cat\n\n  b\n"
    jsonl = '{"question": "a cat", "prompt": 3}\n\n{"question": "b"}\n'
    for arguments, stdin in (
        (["a cat", "b"], None),
        ([], lines),
        (["--input", "-", "--field", "question"], jsonl),
    ):
        result = run(target, *arguments, *speculation, "--no-stream", stdin=stdin)
        assert result.exit_code == 0, result.output
        assert result.stdout == f"> a cat\n{expected[0]}\n\n> b\n{expected[1]}\n\n"


def test_one_text_is_printed_alone_and_streamed(pair_folders: tuple[Path, Path]) -> None:
    target, drafter = pair_folders
    (expected,) = plain_texts(target, ["a cat"])
    for options in ([], ["--no-stream"], ["--spec-model", drafter, "--mark-accepted"]):
        assert run(target, "a cat", *options).stdout == f"{expected}\n"


def test_accepted_tokens_are_marked_when_asked_for(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    styles = []

    def streamer(tokenizer: Any, console: Any, style: str) -> None:
        styles.append(style)

    monkeypatch.setattr(generate_module, "BlockStreamer", streamer)
    for options in ([], ["--mark-accepted"]):
        run(pair_folders[0], "a", "--spec-model", pair_folders[1], *options)
    assert styles == ["", ACCEPTED_STYLE]


def test_chat_models_are_asked_by_their_template(
    chat_target: Path, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "bye"},
    ]
    source.write_text(json.dumps({"prompt": "hi"}) + "\n" + json.dumps({"messages": messages}))
    arguments = ["--input", source, "--output", output, "--spec-model", pair_folders[1]]
    result = run(chat_target, *arguments, "--system", "be", "--batch-size", 2)
    assert result.exit_code == 0, result.output
    asked = ["s:be|u:hi|a:", "s:be|u:hi|a:yo|u:bye|a:"]
    rows = rows_of(output)
    assert [row["text"] for row in rows] == plain_texts(chat_target, asked)
    assert rows[1]["prompt"] == messages
    assert run(chat_target, "hi", "--no-chat").stdout.strip() == plain_texts(chat_target, ["hi"])[0]


def test_statistics_are_logged(pair_folders: tuple[Path, Path], monkeypatch: Any) -> None:
    target, drafter = pair_folders
    monkeypatch.setattr(generate_module, "LOG_INTERVAL", 0.0)
    result = run(target, "a", "b", "--spec-model", drafter, "--log-stats")
    lines = [line for line in result.stderr.splitlines() if line.startswith("SpecDecoding metrics")]
    counts = [int(line.split("Drafted: ")[1].split()[0]) for line in lines]
    # One line for each prompt, one for the run.
    assert len(counts) == 3
    assert counts[0] + counts[1] == counts[2] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--input", "{input}"], "from the arguments, not from both"),
        (["a", "--field", "x"], "x would be a field of --input"),
        (["a", "--stream", "--batch-size", "2"], "one at a time: leave out --batch-size"),
        (["a", "--mark-accepted"], "drafts are marked in texts"),
        (["a", "--log-stats"], "there is no drafter"),
        (["a", "--overwrite"], "there is no --output to begin anew"),
        (["a", "--seed", "3"], "3 changes nothing in greedy decoding"),
        (["a", "--temperature", "0", "--top-p", "0.5"], "0 is greedy"),
        (["--input", "{input}", "--field", "x"], "line 1 has no field 'x' but ['id', 'prompt']"),
        (["--input", "absent.jsonl"], "there is no file absent.jsonl"),
        ([], "give texts behind the target"),
    ],
)
def test_options_that_contradict_are_refused(
    arguments: list[str], message: str, input_file: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(generate_module, "load_pair", None)  # not reached
    result = run("target", *[a.format(input=input_file) for a in arguments], stdin="")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is a list, not an object"),
        ('{"text": "a"}', "line 2 has no field 'prompt' or 'messages' but ['text']"),
        ('{"prompt": 3}', "line 2 must have in 'prompt' a text"),
        ('{"messages": [{"role": "user"}]}', "line 2 must have in 'messages' a text, or messages"),
        ('{"messages": []}', "line 2 must have in 'messages'"),
        ('{"prompt": "a", "seed": "b"}', "as seed, if it has one, an integer"),
        (f'{{"prompt": "a", "seed": {2**63}}}', "as seed, if it has one, an integer of 64 bits"),
        ('{"prompt": "a\\ud800"}', "line 2 has half a surrogate pair in 'prompt'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate pair in 'messages'"),
    ],
)
def test_wrong_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    result = run("target", "--input", path)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    result = run("target", "--input", path)
    assert result.exit_code == 2
    assert "in.jsonl is not UTF-8" in " ".join(result.output.replace("│", " ").split())


def test_an_argument_that_is_no_text_is_named() -> None:
    with pytest.raises(typer.BadParameter, match=r"argument 2 \('\\udcff'\) is not text in UTF-8"):
        items_of(["a", "\udcff"])


def test_lines_end_with_line_ends_only() -> None:
    text = "one\x0cpage\n two\u2028parts\r\n\nthree\x85\n"
    assert split_lines(text) == ("one\x0cpage", "two\u2028parts", "three")


@pytest.mark.parametrize(
    ("options", "stdin", "message"),
    [
        (["--system", "be", "a"], None, "--system needs a chat template"),
        (["--input", "-"], '{"messages": [{"role": "user", "content": "a"}]}', "prompt 0 of mess"),
        ([""], None, "prompt 0 ('') has no tokens"),
    ],
)
def test_prompts_that_do_not_fit_the_target_are_refused_before_any_text(
    pair_folders: tuple[Path, Path], monkeypatch: Any, options: Any, stdin: Any, message: str
) -> None:
    monkeypatch.setattr(generate_module, "generate_batch", None)  # not reached
    result = run(pair_folders[0], *options, stdin=stdin)
    assert result.exit_code == 1
    assert message in result.output


def test_a_pair_that_does_not_fit_is_refused(
    pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, _ = pair_folders
    result = run(target, "a", "--spec-model", target)
    assert result.exit_code == 1
    message = "hf-specdec generate: speculative_config names the target itself as model"
    assert message in result.output
    result = run(target, "a", "--spec-model", tmp_path / "absent")
    assert result.exit_code == 1
    assert "it must be the Hub id or folder of a drafter" in result.output
    output = tmp_path / "out.jsonl"
    result = run(tmp_path / "absent", "a", "--output", output)
    assert result.exit_code == 1
    assert f"TARGET {tmp_path / 'absent'} is neither a folder with a config.json" in result.output
    assert not output.exists()
