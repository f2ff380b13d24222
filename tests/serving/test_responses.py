"""Responses through OpenAI's client."""

from typing import Any

import openai
import pytest
from serving_server import MODEL, Running


def ask(running: Running, text: Any, **fields: Any) -> Any:
    return running.client.responses.create(
        **{"model": MODEL, "input": text, "temperature": 0, **fields}
    )


@pytest.mark.parametrize("text", ["hello there", "what is it"])
def test_greedy_is_what_plain_generate_says(running, text):
    answer = ask(running, text)
    assert answer.output_text == running.greedy(running.chat_prompt(text))
    assert answer.usage.output_tokens == len(running.greedy_ids(running.chat_prompt(text)))
    assert answer.usage.input_tokens == len(running.chat_prompt(text))
    assert answer.usage.speculation["num_accepted_tokens"] > 0


def test_the_whole_conversation_and_instructions(running):
    turns: Any = [
        {"role": "user", "content": "hello"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    answer = ask(running, turns, instructions="be brief")
    assert answer.output_text == running.greedy("s:be brief|u:hello|a:x|u:go on|a:")


def test_an_answer_that_was_cut_is_incomplete(running):
    answer = ask(running, "hello there", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == running.greedy(running.chat_prompt("hello there"), 4)


def test_a_stream(running):
    events = list(ask(running, "hello there", stream=True))
    whole = ask(running, "hello there")
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-4].text == whole.output_text and len(deltas) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage == whole.usage
    assert events[-1].response.output_text == whole.output_text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input: .* at least 1"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input_image.* is not text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id.*Send the whole conversation"),
        ({"max_output_tokens": 1000}, "max_output_tokens=1000: .* left"),
    ],
)
def test_what_is_refused(running, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(
            running,
            **{"text": "hello", **{("text" if k == "input" else k): v for k, v in fields.items()}},
        )
