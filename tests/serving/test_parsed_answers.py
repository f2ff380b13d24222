"""Reasoning and tool calls, where transformers knows how a model writes them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving_server import MODEL, Running

# Signs that the tiny target happens to write take the place of "<think>" and its end.
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "a:",
    "fields": {
        "reasoning_content": {"open": "<", "close": "|", "content": "text"},
        "content": {"close_pattern": "</s>", "content": "text"},
    },
}
TOOLS = {
    **TEMPLATE,
    "fields": {
        # Every "<" begins a call of the tool that is named behind it.
        "tool_calls": {
            "open_pattern": r"<(?P<name>\w+)",
            "close": "|",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close_pattern": "</s>", "content": "text"},
    },
}
TEXT = "hello there"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": TEXT}],
    "temperature": 0,
}


@pytest.fixture
def template(running: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    running.tokenizer.response_template = request.param
    yield request.param
    running.tokenizer.response_template = None


def parsed(running: Running) -> tuple[str, str]:
    """What the target says, and what stands between the signs in the middle of it."""
    text = running.greedy(running.chat_prompt(TEXT))
    inner = re.search(r"<(.*?)\|", text)
    assert inner is not None and inner.start() > 0
    return text[: inner.start()] + text[inner.end() :], inner[1]


def collect(chunks: Any, field: str) -> str:
    return "".join(getattr(chunk.choices[0].delta, field, None) or "" for chunk in chunks)


@pytest.mark.parametrize("template", [TEMPLATE], indirect=True)
def test_reasoning_is_apart(running, template):
    content, reasoning = parsed(running)
    message = running.client.chat.completions.create(**CHAT).choices[0].message
    assert (message.content, message.reasoning_content) == (content, reasoning)
    chunks = list(running.client.chat.completions.create(**CHAT, stream=True))
    assert collect(chunks, "content") == content
    assert collect(chunks, "reasoning_content") == reasoning


@pytest.mark.parametrize("template", [TEMPLATE], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_of_a_response(running, template, stream):
    content, reasoning = parsed(running)
    answer = running.client.responses.create(model=MODEL, input=TEXT, temperature=0, stream=stream)
    deltas: dict[str, str] = {}
    if stream:
        events = list(answer)
        for event in events:
            if event.type.endswith(".delta"):
                deltas[event.type] = deltas.get(event.type, "") + event.delta
        answer = events[-1].response
        assert deltas == {
            "response.output_text.delta": content,
            "response.reasoning_text.delta": reasoning,
        }
    assert answer.output_text == content
    items = [item for item in answer.output if item.type == "reasoning"]
    assert [item.content[0].text for item in items] == [reasoning]


@pytest.mark.parametrize("template", [TOOLS], indirect=True)
def test_a_tool_call(running, template):
    content, call = parsed(running)
    name, arguments = call.split(" ", 1)
    choice = running.client.chat.completions.create(**CHAT).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == content
    got = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert got == [(name, arguments.strip())]
    chunks = list(running.client.chat.completions.create(**CHAT, stream=True))
    deltas = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [(c.function.name, c.function.arguments) for c in deltas] == got
    assert [c.index for c in deltas] == list(range(len(got)))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("template", [TOOLS], indirect=True)
def test_a_tool_call_is_an_item_of_a_response(running, template):
    name, arguments = parsed(running)[1].split(" ", 1)
    answer = running.client.responses.create(model=MODEL, input=TEXT, temperature=0)
    items = [item for item in answer.output if item.type == "function_call"]
    assert [(i.name, i.arguments) for i in items] == [(name, arguments.strip())]
    events = list(running.client.responses.create(
        model=MODEL, input=TEXT, temperature=0, stream=True
    ))  # fmt: skip
    assert [type(i) for i in events[-1].response.output] == [type(i) for i in answer.output]
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [e.arguments for e in done] == [arguments.strip()]
