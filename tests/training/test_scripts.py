"""Scripts, and the path of one document through its script."""

import random

import pytest

from hf_specdec.training import ChatScripts, Forced, Free, PromptScripts, Temperatures
from hf_specdec.training.documents import DocumentInProgress

STOP = 2


def run(script, choices, prefix=(1,), max_length=50):
    """Tokens and flags when the target chooses ``choices`` one after the other."""
    document = DocumentInProgress(0, 0, prefix, script, {STOP}, max_length)
    choices, temperatures = iter(choices), []
    while True:
        temperatures.append(document.temperature)
        # A choice is made after every token, but only used where the script is free.
        used = document.position + 1 == len(document.tokens) and temperatures[-1] > 0
        if not document.advance(next(choices) if used else 63):
            break
    assert document.position == len(document.tokens)
    return document.tokens, [int(flag) for flag in document.learn]


def test_prompt_and_answer():
    script = [Forced((5, 6)), Free(9, 1.0)]
    assert run(script, [7, 8, STOP]) == ([1, 5, 6, 7, 8, STOP], [0, 0, 0, 1, 1, 1])


def test_answer_that_is_cut_off():
    script = [Forced((5,)), Free(2, 1.0)]
    assert run(script, [7, 8, 9]) == ([1, 5, 7, 8], [0, 0, 1, 1])


def test_forced_text_takes_the_place_of_a_stop_token():
    # The end of the answer is part of the forced text, and it is the target's own choice.
    script = [Free(9, 1.0), Forced((STOP, 30)), Free(1, 1.0)]
    assert run(script, [7, STOP, 8]) == ([1, 7, STOP, 30, 8], [0, 1, 1, 0, 1])
    # Forced text that begins otherwise: the stop token is left out.
    script = [Free(9, 1.0), Forced((40, 30)), Free(1, 1.0)]
    assert run(script, [7, STOP, 8]) == ([1, 7, 40, 30, 8], [0, 1, 0, 0, 1])
    # Cut off: the target did not choose to stop there.
    script = [Free(1, 1.0), Forced((STOP, 30)), Free(1, 1.0)]
    assert run(script, [7, 8]) == ([1, 7, STOP, 30, 8], [0, 1, 0, 0, 1])


def test_turns_that_are_not_learned_and_have_their_own_stop():
    script = [Free(9, 1.0, learn=False, stop_ids=(40,)), Forced((40,)), Free(9, 0.5)]
    assert run(script, [7, 40, 8, STOP]) == ([1, 7, 40, 8, STOP], [0, 0, 0, 1, 1])


def test_every_script_is_cut_at_max_length():
    assert run([Forced((5, 6, 7, 8))], [], max_length=4)[0] == [1, 5, 6, 7]
    assert run([Forced((5,)), Free(9, 1.0)], [7, 8, 9], max_length=4)[0] == [1, 5, 7, 8]


def test_a_document_needs_a_first_token():
    with pytest.raises(ValueError, match="begins with a free segment"):
        DocumentInProgress(0, 0, (), [Free(3, 0.0)], {STOP}, 9)


def test_chat_template_is_read(tokenizer):
    scripts = ChatScripts(tokenizer, openings=["Why"], second_turn_share=1.0)
    assert tokenizer.decode(list(scripts.prefix)) == "B S E B user"
    script = scripts.script(0, random.Random(0))
    texts = [tokenizer.decode(list(s.tokens)) for s in script if isinstance(s, Forced)]
    assert texts == ["Why", "E B assistant", "E B user", "E B assistant"]
    free = [s for s in script if isinstance(s, Free)]
    assert [s.learn for s in free] == [False, True, False, True]
    assert free[0].stop_ids == (2,)
    assert free[1].temperature == free[3].temperature


def test_chat_template_that_is_missing_or_changes_the_text(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content|lower }}"
    with pytest.raises(ValueError, match="once and unchanged"):
        ChatScripts(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatScripts(tokenizer)


def test_prompts_end():
    greedy = Temperatures(greedy_share=1)
    scripts = PromptScripts([[4, 5], [6]], max_new_tokens=7, temperatures=greedy)
    assert scripts.prefix == ()
    assert scripts.script(0, random.Random(0)) == [Forced((4, 5)), Free(7, 0.0)]
    assert scripts.script(2, random.Random(0)) is None
    shared = PromptScripts([[4, 5, 6], [4, 5], [4, 5, 1]], 7, greedy)
    assert shared.prefix == (4, 5)
    assert shared.script(0, random.Random(0)) == [Forced((6,)), Free(7, 0.0)]
    assert shared.script(1, random.Random(0)) == [Free(7, 0.0)]


def test_temperatures():
    drawn = [Temperatures(0.5, 0.6, 0.9).draw(random.Random(i)) for i in range(400)]
    assert 150 < drawn.count(0.0) < 250
    others = [value for value in drawn if value]
    assert 0.6 <= min(others) < 0.65 < 0.85 < max(others) <= 0.9


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Temperatures(greedy_share=1.5), "greedy_share=1.5"),
        (lambda: Temperatures(low=0.0), "low=0.0"),
        (lambda: Forced(()), "tokens is empty"),
        (lambda: Free(0, 1.0), "max_tokens=0"),
        (lambda: Free(3, -1.0), "temperature=-1.0"),
        (lambda: PromptScripts([[3], []]), r"prompts\[1\] is empty"),
    ],
)
def test_refusals(make, match):
    with pytest.raises(ValueError, match=match):
        make()
