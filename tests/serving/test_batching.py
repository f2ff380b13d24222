"""Many requests at once: they share batches, and nobody can tell from the answers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving_server import MODEL, holding, serving, wait_for
from tiny_models import EOS

from hf_specdec.serving.engine import BatchingLimits, Engine
from hf_specdec.serving.rows import Row
from hf_specdec.serving.sampling import Sampling

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]
PROMPTS = [" ".join(WORDS[i % 7 : i % 7 + 2 + i % 5]) + "." * (i % 3) for i in range(24)]
GREEDY = Sampling(0.0, 1.0, 0, 0.0, 1.0)


def batch_sizes(running: Any) -> list[float]:
    """Batches, and rows in them, so far."""
    lines = running.server._application.telemetry.text().splitlines()
    names = ("batch_size_count", "batch_size_sum")
    return [float(line.split()[-1]) for n in names for line in lines if f":{n}" in line]


def test_eight_clients_at_once_are_told_what_plain_generate_says(running):
    def ask(job: tuple[int, str]) -> str:
        index, prompt = job
        limit = 8 + index % 3 * 12
        fields: Any = {"model": MODEL, "temperature": 0, "max_tokens": limit}
        if index % 3 == 0:
            return running.client.completions.create(prompt=prompt, **fields).choices[0].text
        if index % 3 == 1:
            chunks = running.client.completions.create(prompt=prompt, stream=True, **fields)
            return "".join(chunk.choices[0].text for chunk in chunks)
        answer = running.client.completions.create(prompt=prompt, stop="o", **fields)
        return answer.choices[0].text

    expected = []
    for index, prompt in enumerate(PROMPTS):
        text = running.greedy(prompt, 8 + index % 3 * 12)
        expected.append(text.split("o")[0] if index % 3 == 2 else text)
    before = batch_sizes(running)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, enumerate(PROMPTS)))
    assert answers == expected
    batches, rows = (b - a for a, b in zip(before, batch_sizes(running), strict=True))
    assert rows == len(PROMPTS) > batches


def test_a_seeded_text_does_not_depend_on_the_company(running):
    fields: Any = {"model": MODEL, "temperature": 1.0, "max_tokens": 16}

    def ask(index: int) -> str:
        return (
            running.client.completions.create(prompt=PROMPTS[index], seed=index, **fields)
            .choices[0]
            .text
        )

    alone = [ask(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_requests_that_choose_otherwise_wait_for_their_turn(running):
    def ask(index: int) -> str:
        settings: Any = [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.5}][index % 2]
        return (
            running.client.completions.create(
                model=MODEL, prompt=PROMPTS[index], seed=index, max_tokens=12, **settings
            )
            .choices[0]
            .text
        )

    alone = [ask(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert alone[::2] == [running.greedy(prompt, 12) for prompt in PROMPTS[:8:2]]


def test_a_finished_row_does_not_wait_for_the_others(running):
    long = next(p for p in PROMPTS if EOS not in running.greedy_ids(p, 100))
    fields: Any = {"model": MODEL, "temperature": 0}
    # The batch starts when both are there.
    with serving(max_batch_size=2, batch_wait=10.0) as two, ThreadPoolExecutor(2) as pool:
        create: Any = two.client.completions.create
        with holding(two.target, after=6) as hold:
            slowly = pool.submit(create, prompt=long, max_tokens=100, **fields)
            short = pool.submit(create, prompt=PROMPTS[1], max_tokens=4, **fields)
            assert short.result().choices[0].text == running.greedy(PROMPTS[1], 4)
            assert not slowly.done()
            hold.release()
            assert slowly.result().choices[0].text == running.greedy(long, 100)
        assert batch_sizes(two) == [1, 2]


def test_one_at_a_time(running):
    with serving(max_batch_size=1) as single:
        answer = single.client.completions.create(
            model=MODEL, prompt=PROMPTS[:3], temperature=0, max_tokens=8
        )
        assert [choice.text for choice in answer.choices] == [
            running.greedy(prompt, 8) for prompt in PROMPTS[:3]
        ]
        assert batch_sizes(single) == [3, 3]


def test_several_batches_at_once(running):
    """A long text doesn't keep a later one waiting."""
    long = next(p for p in PROMPTS if EOS not in running.greedy_ids(p, 100))
    fields: Any = {"model": MODEL, "temperature": 0}
    with (
        serving(concurrent_batches=2, knowing=False) as two,
        holding(two.target, after=3) as hold,
    ):
        stream = two.client.completions.create(prompt=long, max_tokens=100, stream=True, **fields)
        wait_for(lambda: two.engine.num_running == 1)
        later = two.client.completions.create(prompt=PROMPTS[1], max_tokens=8, **fields)
        assert two.engine.num_running == 1
        hold.release()
        assert later.choices[0].text == running.greedy(PROMPTS[1], 8)
        assert "".join(chunk.choices[0].text for chunk in stream) == running.greedy(long, 100)


class TestCompatible:
    """What may share a batch; the engine's thread isn't running."""

    def batch(
        self, running: Any, rows: list[tuple[int, int, Sampling]], **limits: Any
    ) -> list[int]:
        engine = Engine(
            running.plain, 0, BatchingLimits(**limits), running.server._application.telemetry
        )
        made = [
            Row([3] * length, new, sampling, 0, None, lambda update: None, False)  # type: ignore[arg-type]
            for length, new, sampling in rows
        ]
        engine.submit(made)
        return [made.index(row) for row in engine._compatible()]

    def test_settings_decide(self, running):
        other = Sampling(1.0, 1.0, 0, 0.0, 1.0)
        rows = [(4, 8, GREEDY), (4, 8, other), (6, 9, GREEDY), (4, 8, other)]
        assert self.batch(running, rows) == [0, 2]
        assert self.batch(running, rows[1:]) == [0, 2]

    def test_no_more_than_the_limit_in_their_order(self, running):
        assert self.batch(running, [(4, 8, GREEDY)] * 5, max_batch_size=3) == [0, 1, 2]

    def test_together_they_have_positions(self, running):
        # Row 1 alone has room for its 50 tokens, but not where row 0's long prompt pads it.
        rows = [(200, 8, GREEDY), (100, 60, GREEDY), (190, 56, GREEDY)]
        assert self.batch(running, rows, max_positions=256) == [0, 2]
        assert self.batch(running, rows) == [0, 1, 2]

    def test_short_prompts_are_not_padded_to_a_very_long_one(self, running):
        rows = [(5000, 8, GREEDY), *[(10, 8, GREEDY)] * 4, (4000, 8, GREEDY)]
        assert self.batch(running, rows) == [0, 1, 5]
        assert self.batch(running, rows[1:5]) == [0, 1, 2, 3]


def test_the_model_has_a_position_for_every_draft(running):
    """A learned table of positions has no row behind its last one."""
    prompt = "a" * 250
    answer = running.client.completions.create(
        model=MODEL, prompt=[prompt, "b" * 200], temperature=0, max_tokens=6
    )
    assert answer.choices[0].text == running.greedy(prompt, 6)
    with pytest.raises(Exception, match="behind it this model has 6"):
        running.client.completions.create(model=MODEL, prompt=prompt, max_tokens=7)
