"""Text completions through OpenAI's client."""

from typing import Any

import pytest
from serving_server import MODEL, Running


def ask(running: Running, prompt: Any, **fields: Any) -> Any:
    return running.client.completions.create(
        **{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
    )


def texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


@pytest.mark.parametrize("prompt", ["hello there", "a", "some words and some more"])
def test_greedy_is_what_plain_generate_says(running, prompt):
    answer = ask(running, prompt)
    assert texts(answer) == [running.greedy(prompt, 16)]
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.speculation["num_accepted_tokens"] > 0


def test_prompts_may_be_texts_ids_or_lists_of_them(running):
    prompts = ["hello there", "what is it"]
    expected = [running.greedy(prompt, 16) for prompt in prompts]
    ids = [running.tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert texts(ask(running, prompts)) == expected
    assert texts(ask(running, ids)) == expected
    assert texts(ask(running, ids[1])) == expected[1:]
    assert ask(running, prompts).usage.prompt_tokens == sum(map(len, prompts))


def test_choices_of_a_prompt_stand_together(running):
    prompts, fields = ["hello there", "what is it"], {"temperature": 1.0, "seed": 8}
    answer = ask(running, prompts, n=2, **fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = ask(running, prompts[0], n=2, **fields)
    assert texts(answer)[:2] == texts(alone)
    assert len(set(texts(answer))) == 4


def test_a_stream(running):
    prompts = ["hello there", "what is it"]
    got, usage = ["", ""], None
    options = {"include_usage": True}
    for chunk in ask(running, prompts, stream=True, stream_options=options, stop="b"):
        usage = usage or chunk.usage
        for choice in chunk.choices:
            got[choice.index] += choice.text
    assert got == texts(ask(running, prompts, stop="b"))
    assert "b" not in "".join(got)
    assert usage is not None and usage.completion_tokens > 0
