"""Text from tokens: whole characters, stop strings, and transformers' parser."""

from typing import Any

import pytest
from tiny_models import EOS
from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.utils.chat_parsing.response_parser import ResponseParser

from hf_specdec.serving.row_text import RowText

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "a:",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<end>", "content": "text"},
    },
}


class Bytes:
    """A tokenizer whose tokens are bytes; the first space of a text is dropped, as Llama's does."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text = bytes(i for i in ids if i >= 8 or not skip_special_tokens).decode("utf-8", "replace")
        return text.removeprefix(" ")


def run(text: RowText, ids: bytes) -> tuple[list[Any], int | None]:
    """All pieces, and the number of tokens after which a stop string was complete."""
    pieces: list[Any] = []
    for count, token in enumerate(ids, start=1):
        if text.push(token):
            return pieces + text.release(final=True), count
        pieces += text.release()
    return pieces + text.release(final=True), None


@pytest.mark.parametrize("said", ["plain", "a b  c", " led by a space", "ä → 𝄞!", "x\n\ny"])
def test_pieces_are_the_whole_text(said):
    pieces, _ = run(RowText(Bytes()), said.encode())
    assert "".join(pieces) == Bytes().decode(list(said.encode()))
    assert all("\ufffd" not in piece for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_generate_shows_it():
    ids = "ab→".encode()[:-1]
    pieces, _ = run(RowText(Bytes()), ids)
    assert "".join(pieces) == Bytes().decode(list(ids)) == "ab\ufffd"


@pytest.mark.parametrize(
    ("stop", "shown", "count"),
    [
        (["cd"], "ab", 4),
        (["f", "cd"], "ab", 4),
        (["abc"], "", 3),
        (["cdx", "de"], "abc", 5),
        (["x"], "abcdef", None),
        (["fg"], "abcdef", None),
        (["→"], "abcdef", None),
    ],
)
def test_stop_strings(stop, shown, count):
    pieces, stopped = run(RowText(Bytes(), stop), b"abcdef")
    assert "".join(pieces) == shown and stopped == count


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete():
    text = RowText(Bytes(), ["\n\nEnd"])
    shown = []
    for token in b"a\n\nb\n\nEn":
        assert not text.push(token)
        shown += text.release()
    assert "".join(shown) == "a\n\nb"
    assert text.push(ord("d")) and text.release(final=True) == []


def test_several_characters_in_one_token():
    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join(["one", "two", " stop here", "x"][i] for i in ids)

    text = RowText(Words(), ["stop"])
    assert [text.push(i) for i in (0, 1, 2)] == [False, False, True]
    assert text.release(final=True) == ["onetwo "]


def test_an_end_id_is_no_text_though_not_special():
    pieces, _ = run(RowText(Bytes(), end_ids=frozenset([ord("z")])), b"abz")
    assert "".join(pieces) == "ab"
    assert EOS < 8


class TestParser:
    def pieces(self, said: str) -> list[Any]:
        text = RowText(Bytes(), parser=ResponseParser(TEMPLATE, prefix="a:"))
        return run(text, said.encode())[0]

    def content(self, pieces: list[Any]) -> str:
        return "".join(p for p in pieces if type(p) is str)

    def test_reasoning_and_content_and_a_tool_call(self):
        call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        pieces = self.pieces(f"<think>hm, well</think>I add.{call}<end>")
        assert "".join(p for p in pieces if isinstance(p, ReasoningText)) == "hm, well"
        assert self.content(pieces) == "I add."
        calls = [p for p in pieces if isinstance(p, ToolCall)]
        assert [(c.name, c.arguments) for c in calls] == [("add", '{"a": 1}')]

    def test_half_a_tool_call_is_none(self):
        pieces = self.pieces('I add.<tool_call>{"name": "a')
        assert self.content(pieces) == "I add."
        assert not [p for p in pieces if isinstance(p, ToolCall)]

    @pytest.mark.parametrize("call", ['{"name": "f"}', "[1]", "5", '{"arguments": {}}', "null"])
    def test_json_that_is_no_tool_call_is_shown(self, call):
        pieces = self.pieces(f"I add.<tool_call>{call}</tool_call> So.")
        assert not [p for p in pieces if isinstance(p, ToolCall)]
        assert self.content(pieces) == f"I add.{call} So."

    def test_a_tool_call_that_is_no_json_harms_nobody(self):
        pieces = self.pieces("I add.<tool_call>add(1, 2)</tool_call> and so on")
        assert not [p for p in pieces if isinstance(p, ToolCall)]
        assert self.content(pieces).startswith("I add.")
        assert self.content(pieces).endswith(" and so on")
