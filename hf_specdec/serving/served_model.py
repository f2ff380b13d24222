"""The one model that a server serves: its names, its limits, its prompts."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jinja2 import TemplateError

from hf_specdec.modeling.quantized import num_ids
from hf_specdec.serving.api_errors import ApiError

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """Takes the place of transformers' ``ModelManager``, which loads models on demand.

    Attributes:
        target: with an attached drafter.
        tokenizer: of the target.
        name: what clients call it.
        max_positions: tokens of the longest text, prompt included; unlimited if ``None``.
        default_max_tokens: new tokens where a request names no limit.
    """

    target: Any
    tokenizer: Any
    name: str
    max_positions: int | None = None
    default_max_tokens: int = 1024
    created: int = field(default_factory=lambda: int(time.time()))
    # One thread: not every tokenizer can be used by two at a time.
    _tokenizing: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"), init=False, repr=False
    )

    @property
    def vocab_size(self) -> int:
        """Tokens that the target can be shown."""
        return num_ids(self.target.get_input_embeddings())

    def list_models(self) -> list[dict[str, Any]]:
        """Entries of ``/v1/models``."""
        entry = {"id": self.name, "object": "model", "created": self.created}
        return [{**entry, "owned_by": "hf-specdec", "max_model_len": self.max_positions}]

    def shutdown(self) -> None:
        """Called by transformers' application at its end: the tokenizer's thread ends."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def beside(self, work: Callable[[], T]) -> T:
        """Tokenize in the tokenizer's thread: a long prompt must not keep all clients waiting.

        Args:
            work: calls `encode` or `encode_chat`.
        """
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    def check_name(self, name: str | None) -> None:
        """Raise ApiError, 404, unless a request means this model."""
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"The model {name!r} is not served here; {self.name!r} is",
                "model",
                "model_not_found",
            )

    def encode(self, text: str) -> list[int]:
        """A prompt without a template, with the tokenizer's own special tokens."""
        return self.tokenizer(text)["input_ids"]

    def own_template_kwargs(self, template_kwargs: dict[str, Any]) -> list[str]:
        """Names that are no variables of a template, but arguments of ``apply_chat_template``.

        They would change what the tokenizer does, for other requests too.
        """
        parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return sorted(name for name in template_kwargs if name in parameters)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """A conversation through the tokenizer's chat template.

        Raises:
            ApiError: 400, there is no template, or it refuses the messages, or the keyword
                arguments aren't for the template.
        """
        if own := self.own_template_kwargs(template_kwargs):
            raise ApiError(
                400,
                f"chat_template_kwargs has {own}, which the server sets itself. Leave it out",
                "chat_template_kwargs",
            )
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages,
                tools=copy.deepcopy(tools),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **template_kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ApiError(
                400, f"The chat template can't be applied: {error}", "messages"
            ) from None
        return encoded["input_ids"]

    def check_prompt(self, token_ids: list[int], param: str) -> None:
        """Raise ApiError, 400, for an empty prompt, unknown ids, or one without room behind it."""
        if not token_ids:
            raise ApiError(400, f"{param} is empty: it must have at least one token", param)
        if max(token_ids) >= self.vocab_size:
            raise ApiError(400, f"{param}: token ids must be less than {self.vocab_size}", param)
        if self.max_positions is not None and len(token_ids) >= self.max_positions:
            raise _too_long(
                f"The prompt has {len(token_ids)} tokens, and this model has {self.max_positions} "
                "positions for prompt and answer",
                param,
            )

    def max_new_tokens(self, asked: int | None, prompt_length: int, param: str) -> int:
        """A row's limit.

        Raises:
            ApiError: 400, more than there are positions.
        """
        room = None if self.max_positions is None else self.max_positions - prompt_length
        if asked is None:
            return self.default_max_tokens if room is None else min(self.default_max_tokens, room)
        if room is not None and asked > room:
            raise _too_long(
                f"{param}={asked}: the prompt has {prompt_length} tokens, and behind it this model "
                f"has {room} of its {self.max_positions} positions left",
                param,
            )
        return asked


def _too_long(message: str, param: str) -> ApiError:
    return ApiError(400, message, param, "context_length_exceeded")
