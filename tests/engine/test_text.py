"""What a tokenizer is needed for: stop strings, and transformers' streamers of text."""

import asyncio
import string
import threading
from typing import Any

import pytest
from tiny_models import EOS, PAD, VOCAB_SIZE, ScriptedDrafter, row_by_row, sometimes_wrong
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AsyncTextIteratorStreamer,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
)

NEW = 24
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture
def tokenizer():
    """One character a token; letters are the ids from 3 on."""
    special = ["<pad>", "<bos>", "<eos>"]
    letters = (string.ascii_letters + string.digits + " ")[: VOCAB_SIZE - 3]
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def text(target, prompts):
    """What the target says to the first prompt, as ids."""
    return row_by_row(target, prompts(1), **GREEDY)[0]


class TestStopStrings:
    @pytest.mark.parametrize("start", [1, 5, 9])
    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_a_string_inside_or_across_accepted_runs(
        self, start, length, target, prompts, tokenizer, text
    ):
        stop = tokenizer.decode(text[start : start + length])
        common = {**GREEDY, "stop_strings": [stop, "never said"], "tokenizer": tokenizer}
        plain = target.generate(**prompts(1), **common)
        assert plain.shape[1] < prompts(1)["input_ids"].shape[1] + NEW
        for k in (1, 4):
            drafter = ScriptedDrafter([text], num_draft_tokens=k)
            ours = target.generate(**prompts(1), **common, assistant_model=drafter)
            assert ours.tolist() == plain.tolist()

    def test_every_row_of_a_batch(self, target, prompts, tokenizer):
        inputs = prompts(3)
        texts = row_by_row(target, inputs, **GREEDY)
        stops = [tokenizer.decode(row[i : i + 2]) for i, row in zip((3, 8, 14), texts, strict=True)]
        common = {
            **GREEDY, "stop_strings": stops, "tokenizer": tokenizer, "eos_token_id": EOS
        }  # fmt: skip
        plain = target.generate(**inputs, **common)
        ours = target.generate(
            **inputs, **common, assistant_model=ScriptedDrafter(texts, sometimes_wrong)
        )
        assert ours.tolist() == plain.tolist()
        assert (plain[:, -1] == PAD).any()


class TestStreamers:
    def generate(self, target, prompts, text, streamer):
        return target.generate(
            **prompts(1),
            **GREEDY,
            assistant_model=ScriptedDrafter([text], sometimes_wrong),
            streamer=streamer,
        )

    def test_text(self, target, prompts, tokenizer, text, capsys):
        self.generate(target, prompts, text, TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out == tokenizer.decode(text) + "\n"

    def test_iterator(self, target, prompts, tokenizer, text):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=self.generate, args=(target, prompts, text, streamer))
        thread.start()
        pieces = list(streamer)
        thread.join()
        assert "".join(pieces) == tokenizer.decode(text)

    def test_async_iterator(self, target, prompts, tokenizer, text):
        async def run() -> str:
            streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
            work = asyncio.to_thread(self.generate, target, prompts, text, streamer)
            task = asyncio.create_task(work)
            said = "".join([piece async for piece in streamer])
            await task
            return said

        assert asyncio.run(run()) == tokenizer.decode(text)

    def test_nothing_behind_the_end_of_sequence(self, target, prompts, text):
        blocks: list[int] = []

        class Streamer:
            def put(self, value):
                blocks.extend(value.flatten().tolist())

            def end(self):
                blocks.append(-1)

        eos = text[5]
        target.generate(
            **prompts(1),
            **GREEDY,
            eos_token_id=eos,
            assistant_model=ScriptedDrafter([text]),
            streamer=Streamer(),
        )
        stop = text.index(eos) + 1
        assert blocks == prompts(1)["input_ids"][0].tolist() + text[:stop] + [-1]
