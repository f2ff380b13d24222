"""What a self-generated document consists of: given tokens and free ones, in turns.

A prompt followed by an answer is ``[Forced(prompt), Free(300)]``. A chat model also writes the
prompts: given the beginning of a user turn it continues with what users ask ("Magpie", Xu et al.
2024, arXiv 2406.08464), so that no data set is needed.

Boundary: token ids and numbers. `self_generation` runs them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Forced:
    """Tokens that are given, at least one."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens is empty; leave the segment out")


@dataclass(frozen=True)
class Free:
    """Tokens that the target chooses, until a stop token or ``max_tokens``.

    A stop token is part of the document. Where a `Forced` segment follows, it replaces the stop
    token unless it begins with it.

    Attributes:
        max_tokens: at most so many.
        temperature: 0 takes the most probable token, others sample.
        learn: whether the drafter learns to predict these tokens.
        stop_ids: tokens that end this segment, besides the run's stop ids.
    """

    max_tokens: int
    temperature: float
    learn: bool = True
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")


Script = Sequence[Forced | Free]


class ScriptSource(Protocol):
    """Where scripts come from; scripts must depend on nothing but the arguments.

    Attributes:
        prefix: tokens with which every document begins, in front of its script.
    """

    @property
    def prefix(self) -> tuple[int, ...]: ...

    def script(self, document_id: int, rng: random.Random) -> Script | None:
        """The script of a document, or ``None`` when there are no more."""
        ...

    def settings(self) -> dict[str, Any]:
        """What decides the scripts, for the corpus' metadata."""
        ...


@dataclass(frozen=True)
class Temperatures:
    """One temperature per document: ``greedy_share`` of them 0, the others between two bounds."""

    greedy_share: float = 0.5
    low: float = 0.5
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share={self.greedy_share} must be 0 to 1")
        if not 0 < self.low <= self.high:
            raise ValueError(f"low={self.low} must be positive and at most high={self.high}")

    def draw(self, rng: random.Random) -> float:
        """The temperature of one document."""
        is_greedy = rng.random() < self.greedy_share
        return 0.0 if is_greedy else rng.uniform(self.low, self.high)


class PromptScripts:
    """Given prompts, each answered once. What all of them begin with is run once only.

    Args:
        prompts: token lists, beginning-of-text tokens and chat template included.
        max_new_tokens: length of an answer at most.
        temperatures: of the answers.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 256,
        temperatures: Temperatures | None = None,
    ) -> None:
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompts[{number}] is empty; a prompt needs at least one token")
        # Sorted lists: what the first and the last have in common, all have.
        ends = [min(map(list, prompts)), max(map(list, prompts))] if prompts else [[], []]
        self.prefix: tuple[int, ...] = tuple(map(int, commonprefix(ends)))
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._temperatures = temperatures or Temperatures()

    def script(self, document_id: int, rng: random.Random) -> Script | None:
        """Prompt number ``document_id`` and its answer."""
        if document_id >= len(self._prompts):
            return None
        prompt = tuple(int(token) for token in self._prompts[document_id])
        rest = prompt[len(self.prefix) :]
        answer = Free(self._max_new_tokens, self._temperatures.draw(rng))
        return [Forced(rest), answer] if rest else [answer]

    def settings(self) -> dict[str, Any]:
        """Number of prompts and a sum over them, length and temperatures."""
        return {
            "num_prompts": len(self._prompts),
            "prompts_sha256": _sha256(self._prompts),
            "max_new_tokens": self._max_new_tokens,
            "temperatures": vars(self._temperatures),
        }


class ChatScripts:
    """Conversations whose user turns the model writes too, without end.

    The texts around the turns are read off the tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        openings: beginnings of user turns; "" leaves even the first word to the model. One is
            drawn per document, so repeating one makes it more frequent.
        max_user_tokens, max_new_tokens: lengths of the turns at most.
        second_turn_share: documents with a second question and answer.
        temperatures: of the answers.
        user_temperature: of the questions; below 1 they become alike.

    Raises:
        ValueError: no chat template, or one that does not show the user's text as it is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        openings: Sequence[str] = ("",),
        max_user_tokens: int = 80,
        max_new_tokens: int = 300,
        second_turn_share: float = 0.2,
        temperatures: Temperatures | None = None,
        user_temperature: float = 1.0,
    ) -> None:
        before, between, after = _template_texts(tokenizer)

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self.prefix = encode(before)
        self._user_to_assistant = encode(between)
        self._assistant_to_user = encode(after)
        self._openings = [encode(opening) for opening in openings]
        self._temperatures = temperatures or Temperatures()
        self._user_temperature = user_temperature
        self._max_user_tokens = max_user_tokens
        self._max_new_tokens = max_new_tokens
        self._second_turn_share = second_turn_share

    def script(self, document_id: int, rng: random.Random) -> Script:
        """One conversation."""
        opening = rng.choice(self._openings)
        temperature = self._temperatures.draw(rng)
        script: list[Forced | Free] = [Forced(opening)] if opening else []
        script += self._turn(temperature)
        if rng.random() < self._second_turn_share:
            script += [Forced(self._assistant_to_user), *self._turn(temperature)]
        return script

    def _turn(self, temperature: float) -> list[Forced | Free]:
        # Models end a user's turn with what the template writes there, whatever their stop ids are.
        ends = self._user_to_assistant[:1]
        return [
            Free(self._max_user_tokens, self._user_temperature, learn=False, stop_ids=ends),
            Forced(self._user_to_assistant),
            Free(self._max_new_tokens, temperature),
        ]

    def settings(self) -> dict[str, Any]:
        """All arguments but the tokenizer, whose effect is in the token lists."""
        return {
            "prefix": self.prefix,
            "openings": self._openings,
            "max_user_tokens": self._max_user_tokens,
            "max_new_tokens": self._max_new_tokens,
            "second_turn_share": self._second_turn_share,
            "temperatures": vars(self._temperatures),
            "user_temperature": self._user_temperature,
        }


def _sha256(prompts: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr([int(token) for token in prompt]).encode())
    return digest.hexdigest()[:16]


def _template_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """What a chat template writes before the first user text, after it, and before the next."""
    user, assistant, again = "USERTEXT", "ASSISTANTTEXT", "NEXTTEXT"
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
        {"role": "user", "content": again},
    ]
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} has no chat template; pass prompts as token "
            "lists (PromptScripts) instead"
        )

    def render(conversation: list[dict[str, str]]) -> str:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    single, double = render(messages[:1]), render(messages)
    if single.count(user) != 1 or any(double.count(name) != 1 for name in (assistant, again)):
        raise ValueError(
            "the tokenizer's chat template does not show each turn's text once and unchanged; "
            "pass prompts as token lists (PromptScripts) instead"
        )
    before, between = single.split(user)
    after = double.split(assistant)[1].split(again)[0]
    return before, between, after
