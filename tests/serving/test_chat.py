"""Chat completions through OpenAI's client."""

from typing import Any

import pytest
import torch
from serving_server import MODEL, Running
from tiny_models import EOS
from transformers import LogitsProcessor, LogitsProcessorList

TEXTS = ["hello there", "what is it", "a", "tell me more about all of this"]


def ask(running: Running, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return running.client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0, **fields}
    )


def contents(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def sampled(running: Running, text: str, seed: int, **settings: Any) -> str:
    """What our own loop says in a call of its own."""
    inputs = running.tokenizer(running.chat_prompt(text), return_tensors="pt")
    out = running.direct.generate(
        **inputs, do_sample=True, max_new_tokens=32, row_seeds=[seed], **settings
    )
    new = out[0, inputs["input_ids"].shape[1] :]
    return running.tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_is_what_plain_generate_says(running, text):
    answer = ask(running, text)
    assert contents(answer) == [running.greedy(running.chat_prompt(text))]
    assert answer.choices[0].message.role == "assistant"
    assert (answer.model, answer.object) == (MODEL, "chat.completion")


def test_usage_counts_tokens_and_drafts(running):
    text = TEXTS[0]
    answer = ask(running, text, max_tokens=20)
    usage, stats = answer.usage, answer.usage.speculation
    assert usage.prompt_tokens == len(running.chat_prompt(text))
    assert usage.completion_tokens == 20 and answer.choices[0].finish_reason == "length"
    assert usage.total_tokens == usage.prompt_tokens + 20
    inputs = running.tokenizer(running.chat_prompt(text), return_tensors="pt")
    out = running.direct.generate(
        **inputs, do_sample=False, max_new_tokens=20, return_dict_in_generate=True
    )
    assert stats == {
        "num_drafts": out.speculation.num_drafts,
        "num_draft_tokens": out.speculation.num_draft_tokens,
        "num_accepted_tokens": out.speculation.num_accepted_tokens,
        "num_accepted_tokens_per_pos": out.speculation.accepted_per_position,
        "acceptance_rate": pytest.approx(out.speculation.acceptance_rate, abs=1e-6),
        "mean_acceptance_length": pytest.approx(out.speculation.mean_acceptance_length, abs=1e-6),
    }
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == stats["num_accepted_tokens"]
    assert (
        details.accepted_prediction_tokens + details.rejected_prediction_tokens
        == stats["num_draft_tokens"]
    )


class TestStreams:
    @pytest.mark.parametrize("text", TEXTS)
    def test_pieces_are_the_text(self, running, text):
        chunks = list(ask(running, text, stream=True))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces) == running.greedy(running.chat_prompt(text))
        assert sum(piece != "" for piece in pieces) > 1
        assert chunks[0].choices[0].delta.role == "assistant"
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) == {None}

    def test_usage_comes_last(self, running):
        whole = ask(running, TEXTS[0]).usage
        chunks = list(ask(running, TEXTS[0], stream=True))
        assert chunks[-1].usage == whole and chunks[-1].choices
        assert all(chunk.usage is None for chunk in chunks[:-1])
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(ask(running, TEXTS[0], **asked))
        assert chunks[-1].usage == whole and not chunks[-1].choices
        assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
        asked["stream_options"] = {"include_usage": False}
        assert all(chunk.usage is None for chunk in ask(running, TEXTS[0], **asked))

    def test_several_choices(self, running):
        fields = {"temperature": 1.0, "n": 3, "seed": 4, "max_tokens": 12}
        whole = contents(ask(running, TEXTS[1], **fields))
        texts = ["", "", ""]
        for chunk in ask(running, TEXTS[1], stream=True, **fields):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == whole and len(set(texts)) == 3


class TestEnds:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("start", "length"), [(4, 1), (6, 3), (12, 5)])
    def test_a_stop_string_is_cut_off(self, running, stream, start, length):
        full = running.greedy(running.chat_prompt(TEXTS[0]))
        stop = full[start : start + length]
        answer = ask(running, TEXTS[0], stop=[stop, "never said"], stream=stream)
        if stream:
            chunks = list(answer)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason, usage = chunks[-1].choices[0].finish_reason, chunks[-1].usage
        else:
            text, usage = answer.choices[0].message.content, answer.usage
            reason = answer.choices[0].finish_reason
        assert text == full[: full.index(stop)]
        assert reason == "stop"
        # One token a character: generation ends with the stop string's last one.
        assert usage.completion_tokens == full.index(stop) + length

    def test_what_only_begins_like_a_stop_string_is_shown(self, running):
        full = running.greedy(running.chat_prompt(TEXTS[0]))
        chunks = ask(running, TEXTS[0], stop=full[5:8] + "~", stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == full

    def test_an_end_token(self, running):
        ends = 0
        for text in TEXTS:
            ids = running.greedy_ids(running.chat_prompt(text), 100)
            answer = ask(running, text, max_tokens=100)
            assert answer.usage.completion_tokens == len(ids)
            assert answer.choices[0].finish_reason == ("stop" if ids[-1] == EOS else "length")
            assert "</s>" not in contents(answer)[0]
            ends += ids[-1] == EOS
        assert ends

    def test_a_limit(self, running):
        full = running.greedy(running.chat_prompt(TEXTS[0]))
        for name in ("max_tokens", "max_completion_tokens"):
            answer = ask(running, TEXTS[0], **{name: 3})
            assert contents(answer) == [full[:3]]
            assert answer.choices[0].finish_reason == "length"


class TestSampling:
    @pytest.mark.parametrize(
        "settings",
        [
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.8},
            {"temperature": 1.3, "top_k": 5},
            {"temperature": 0.9, "min_p": 0.1},
            {"temperature": 1.0, "repetition_penalty": 1.4},
        ],
        ids=str,
    )
    def test_settings_are_those_of_generate(self, running, settings):
        own = {
            name: settings.pop(name)
            for name in ("top_k", "min_p", "repetition_penalty")
            if name in settings
        }
        answer = ask(running, TEXTS[0], seed=17, extra_body=own, **settings)
        expected = sampled(running, TEXTS[0], 17, **{"top_k": 0, **settings, **own})
        assert contents(answer) == [expected]

    def test_a_seed_is_a_text(self, running):
        first, again, other = (
            contents(ask(running, TEXTS[0], temperature=1.0, seed=seed)) for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_without_a_seed_texts_differ(self, running):
        texts = {contents(ask(running, TEXTS[0], temperature=1.0))[0] for _ in range(3)}
        assert len(texts) == 3

    def test_the_first_of_n_is_the_only_one_of_1(self, running):
        one = contents(ask(running, TEXTS[0], temperature=1.0, seed=-5))
        answer = ask(running, TEXTS[0], temperature=1.0, seed=-5, n=4)
        assert contents(answer)[:1] == one and len(set(contents(answer))) == 4
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]

    def test_the_default_is_openais(self, running):
        messages: Any = [{"role": "user", "content": TEXTS[0]}]
        answer = running.client.chat.completions.create(model=MODEL, messages=messages, seed=3)
        assert contents(answer) == [sampled(running, TEXTS[0], 3, temperature=1.0, top_k=0)]

    @pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 1.5), (0.5, -1.5)])
    def test_penalties(self, running, presence, frequency):
        class Penalty(LogitsProcessor):
            def __call__(self, input_ids: Any, scores: Any) -> Any:
                scores, said = scores.clone(), input_ids[0, prompt:].tolist()
                for token in said:
                    scores[0, token] -= frequency
                for token in set(said):
                    scores[0, token] -= presence
                return scores

        fields = {"presence_penalty": presence, "frequency_penalty": frequency}
        changed = 0
        for text in TEXTS:
            inputs = running.tokenizer(running.chat_prompt(text), return_tensors="pt")
            prompt = inputs["input_ids"].shape[1]
            out = running.plain.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=32,
                logits_processor=LogitsProcessorList([Penalty()]),
            )
            expected = running.tokenizer.decode(out[0, prompt:], skip_special_tokens=True)
            assert contents(ask(running, text, **fields)) == [expected]
            changed += expected != running.greedy(running.chat_prompt(text))
        assert changed

    def test_logit_bias(self, running):
        full = running.greedy(running.chat_prompt(TEXTS[0]))
        token = running.tokenizer(full[0])["input_ids"][0]
        text = contents(ask(running, TEXTS[0], logit_bias={str(token): -100}))[0]
        assert full[0] not in text


class TestPrompts:
    def test_several_turns_and_parts(self, running):
        turns: Any = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "go on"},
        ]
        answer = running.client.chat.completions.create(model=MODEL, messages=turns, temperature=0)
        assert contents(answer) == [running.greedy("s:be brief|u:hello|a:yes|u:go on|a:")]

    def test_a_variable_of_the_template(self, running):
        template = running.tokenizer.chat_template
        # The server's own default is no.
        running.tokenizer.chat_template = "{{ terse }}|" + template
        try:
            answer = ask(running, "hello", extra_body={"chat_template_kwargs": {"terse": "so"}})
            default = ask(running, "hello")
        finally:
            running.tokenizer.chat_template = template
        assert contents(answer) == [running.greedy("so|u:hello|a:")]
        assert contents(default) == [running.greedy("no|u:hello|a:")]

    def test_no_special_token_is_added_twice(self, running):
        ids = running.tokenizer(running.chat_prompt(TEXTS[2]))["input_ids"]
        assert ask(running, TEXTS[2]).usage.prompt_tokens == len(ids)
        assert torch.tensor(ids).min() > 2
