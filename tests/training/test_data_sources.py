"""Every kind of file and column gives the texts and prompts that are in it."""

import json
import sys
from pathlib import Path

import pytest

from hf_specdec.training.data_sources import DataChoice, open_rows
from hf_specdec.training.prompt_data import read_prompts, read_texts

pytest.importorskip("datasets")
ROWS = [{"id": 1, "prompt": "w1 w2"}, {"id": 2, "prompt": None}, {"id": 3, "prompt": "w3"}]


def write(path: Path) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        path.write_text("id,prompt\n1,w1 w2\n2,\n3,w3\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_files(name, tmp_path):
    rows = open_rows(DataChoice((write(tmp_path / name),)))
    assert (rows.kind, rows.column) == ("prompt", "prompt")
    assert list(rows) == ["w1 w2", "w3"]
    assert rows.skipped == 1


def test_a_folder_is_all_of_its_files(tmp_path):
    folder = tmp_path / "data" / "deep"
    folder.mkdir(parents=True)
    write(folder / "a.jsonl")
    write(folder / "b.jsonl")
    sources = (str(tmp_path / "data"), write(tmp_path / "c.jsonl"))
    assert len(list(open_rows(DataChoice(sources)))) == 6
    write(folder / "c.csv")
    with pytest.raises(ValueError, match="mixes files of several types"):
        open_rows(DataChoice((str(tmp_path / "data"),)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"a folder without a file of \.txt"):
        open_rows(DataChoice((str(tmp_path / "empty"),)))


def test_text_files_by_paragraph_or_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("w1 w2\nw3\n\nw4\n")
    assert list(open_rows(DataChoice((str(file),)))) == ["w1 w2\nw3", "w4"]
    lines = DataChoice((str(file),), column="text", kind="prompt")
    assert [row for row in open_rows(lines) if row] == ["w1 w2", "w3", "w4"]


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    """Without the network: what `load_dataset` is asked for, and a local folder in its place."""
    import datasets

    original = datasets.load_dataset
    asked: dict = {}

    def load(path, name=None, **options):
        asked.update(path=path, name=name, **options)
        file = write(tmp_path / "a.jsonl")
        return original("json", data_files=file, split="train", streaming=options["streaming"])

    monkeypatch.setattr(datasets, "load_dataset", load)
    choice = DataChoice(("owner/chats:en",), split="validation")
    assert list(open_rows(choice)) == ["w1 w2", "w3"]
    expected = {"path": "owner/chats", "name": "en", "split": "validation", "streaming": True}
    assert asked == expected
    assert (choice.datasets, choice.files) == (["owner/chats"], [])


def conversation(tmp_path: Path, **turns) -> DataChoice:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps(turns) + "\n")
    return DataChoice((str(file),))


def test_conversations_go_through_the_template(tokenizer, tmp_path):
    turns = [("user", "w1"), ("assistant", "w2"), ("user", "w3"), ("assistant", "w4 w5")]
    messages = [{"role": role, "content": text} for role, text in turns]
    choice = conversation(tmp_path, messages=messages)
    before = "B S E B user w1 E B assistant w2 E B user w3 E B assistant"
    assert [tokenizer.decode(p) for p in read_prompts(tokenizer, choice, 64, 99)] == [before]
    assert [tokenizer.decode(t) for t in read_texts(tokenizer, choice)] == [f"{before} w4 w5 E"]
    # The names that ShareGPT's files have.
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names[role], "value": text} for role, text in turns]
    choice = conversation(tmp_path, conversations=shared)
    assert [tokenizer.decode(p) for p in read_prompts(tokenizer, choice, 64, 99)] == [before]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template, which conversations need"):
        read_prompts(tokenizer, choice, 64, 99)


def test_prompts_are_turns_where_there_is_a_template(tokenizer, tmp_path):
    choice = DataChoice((write(tmp_path / "a.jsonl"),))
    prompts = read_prompts(tokenizer, choice, 64, 9)
    assert [tokenizer.decode(p) for p in prompts] == ["B S E B user w3 E B assistant"]
    tokenizer.chat_template = None
    assert read_prompts(tokenizer, choice, 64, 9) == [tokenizer.encode("w1 w2")]


def test_texts_are_cut_into_prompts(tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(" ".join(f"w{i % 50}" for i in range(200)) + "\n\nw1 w2")
    prompts = read_prompts(tokenizer, DataChoice((str(file),)), 9, 99)
    assert [len(prompt) for prompt in prompts] == [9] * 12
    assert tokenizer.decode(prompts[1]).split()[0] == "w9"


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"hf-specdec\[train\]"):
        open_rows(DataChoice((write(tmp_path / "a.jsonl"),)))
