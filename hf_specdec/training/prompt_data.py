"""Token lists for both stages from the rows of a data set.

    row         stage 1: texts              stage 2: prompts
    messages    the whole conversation      all before its last answer
    prompt      -                           the prompt as a user's turn
    text        the text                    pieces of its beginning

Conversations and prompts go through the tokenizer's chat template; a prompt for a tokenizer that
has none is taken as it is.

Boundary: values in, token lists out, in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from hf_specdec.training.data_sources import DataChoice, open_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text gives so many prompts, one behind the other (12 in fms-fsdp: 96 rows of 8 texts).
PROMPTS_OF_A_TEXT = 12
# More are hardly answered; all of them are kept in memory.
MOST_PROMPTS = 200_000


def read_texts(tokenizer: PreTrainedTokenizerBase, choice: DataChoice) -> Iterator[list[int]]:
    """Token lists of texts and whole conversations.

    Raises:
        ValueError: the data holds prompts only, or see `open_rows`.
    """
    rows = open_rows(choice)
    if rows.kind == "prompt":
        raise ValueError(
            f"column {rows.column!r} holds prompts, and stage 1 needs texts or conversations; "
            "leave stage 1 out (text_tokens=0) or name a column with text"
        )
    for value in rows:
        if rows.kind == "messages":
            tokens = _apply(tokenizer, value, add_generation_prompt=False)
        else:
            tokens = list(tokenizer.encode(value))
        if tokens:
            yield tokens


def read_prompts(
    tokenizer: PreTrainedTokenizerBase,
    choice: DataChoice,
    piece: int,
    most_tokens: int,
    most: int = MOST_PROMPTS,
) -> list[list[int]]:
    """Different prompts to be answered.

    Args:
        tokenizer: the target's.
        choice: the data.
        piece: tokens of a prompt that is cut from a text.
        most_tokens: longer prompts are left out.
        most: prompts at most.

    Raises:
        ValueError: there is none, or see `open_rows`.
    """
    seen: dict[tuple[int, ...], None] = {}
    too_long = too_short = 0
    for tokens in _prompts(tokenizer, choice, piece):
        if len(tokens) < 2:
            too_short += 1
        elif len(tokens) > most_tokens:
            too_long += 1
        else:
            seen[tuple(tokens)] = None
        if len(seen) == most:
            break
    if not seen:
        raise ValueError(
            f"the data gives no prompt: {too_short} have fewer than 2 tokens, {too_long} more than "
            f"{most_tokens}, and a text must have {piece} tokens (prompt_tokens) to be continued"
        )
    return [list(tokens) for tokens in seen]


def _prompts(
    tokenizer: PreTrainedTokenizerBase, choice: DataChoice, piece: int
) -> Iterator[list[int]]:
    rows = open_rows(choice)
    for value in rows:
        if rows.kind == "text":
            yield from _pieces(list(tokenizer.encode(value)), piece)
        elif rows.kind == "messages":
            if asked := _before_last_answer(value):
                yield _apply(tokenizer, asked, add_generation_prompt=True)
        elif tokenizer.chat_template is None:
            yield list(tokenizer.encode(value))
        else:
            turn = [{"role": "user", "content": value}]
            yield _apply(tokenizer, turn, add_generation_prompt=True)


def _pieces(tokens: list[int], piece: int) -> Iterator[list[int]]:
    starts = range(0, len(tokens) - piece + 1, piece)
    for start in islice(starts, PROMPTS_OF_A_TEXT):
        yield tokens[start : start + piece]


def _before_last_answer(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation up to its last question; empty if nothing was asked."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            return messages[: index + 1]
    return []


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any
) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} has no chat template, which conversations need; "
            "name a column with text or prompts"
        )
    encoded: Any = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, **options
    )
    return list(encoded["input_ids"])
