"""What clients may ask for: the fields of OpenAI's requests, their types and their limits."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_specdec.serving.api_errors import ApiError

_MOST_CHOICES = 128
_Stop = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    # Strict: "5" is no number and True is no integer, as at OpenAI.
    model_config = ConfigDict(extra="forbid", strict=True)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(_Model):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(_Open):
    """A part of a message's content; nothing but text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(_Open):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class GenerationFields(_Model):
    """What every kind of request has.

    Beyond OpenAI's fields, as in vLLM: ``top_k``, ``min_p``, ``repetition_penalty``.
    """

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}
    """Fields of OpenAI's that can't be served: the values that ask for nothing, and the reason."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    # Of no consequence here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def check_refused(self) -> None:
        """Raise ApiError for a field that asks for something this server doesn't do."""
        for name, (neutral, reason) in self.REFUSED.items():
            value = getattr(self, name)
            if not any(value == other and type(value) is type(other) for other in neutral):
                raise ApiError(400, f"{name}={value!r}: {reason}", name, "unsupported_parameter")


class ChoiceFields(GenerationFields):
    """What chat and text completions share."""

    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stop: _Stop | list[_Stop] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream_options: StreamOptions | None = None
    logprobs: Any = None

    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_NO_LOGPROBS = "log probabilities are not returned. Leave it out"


class ChatRequest(ChoiceFields):
    """``POST /v1/chat/completions``."""

    REFUSED = {
        "logprobs": ((None, False), _NO_LOGPROBS),
        "top_logprobs": ((None, 0), _NO_LOGPROBS),
        "response_format": ((None, {"type": "text"}), "the text is not constrained to a format"),
        "tool_choice": ((None, "auto"), 'the model chooses; only "auto" works'),
        "functions": ((None,), "deprecated; use tools"),
        "function_call": ((None,), "deprecated; use tools"),
        "modalities": ((None, ["text"]), 'only ["text"] works'),
        "audio": ((None,), "only text is generated"),
        "web_search_options": ((None,), "there is no web search"),
        "prediction": ((None,), "drafts come from this server's drafter"),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Any = None
    verbosity: Any = None
    top_logprobs: Any = None
    response_format: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    prediction: Any = None


class CompletionRequest(ChoiceFields):
    """``POST /v1/completions``."""

    REFUSED = {
        "logprobs": ((None,), _NO_LOGPROBS),
        "echo": ((None, False), "the prompt is not repeated. Leave it out"),
        "suffix": ((None, ""), "text is not inserted before a suffix. Leave it out"),
        "best_of": ((None, 1), "use n, which returns every text"),
    }

    prompt: str | list[str] | list[_TokenId] | list[list[_TokenId]]
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class ResponsesRequest(GenerationFields):
    """``POST /v1/responses``."""

    REFUSED = {
        "previous_response_id": ((None,), "responses are not kept. Send the whole conversation"),
        "conversation": ((None,), "conversations are not kept. Send the whole conversation"),
        "background": ((None, False), "responses are not kept. Leave it out"),
        "tool_choice": ((None, "auto"), 'the model chooses; only "auto" works'),
        "text": ((None, {"format": {"type": "text"}}), "the text is not constrained to a format"),
        "truncation": ((None, "disabled"), "a prompt that is too long is refused"),
        "include": ((None, []), "nothing can be included"),
        "top_logprobs": ((None, 0), _NO_LOGPROBS),
        "max_tool_calls": ((None,), "there are no built-in tools"),
        "prompt": ((None,), "there are no stored prompts"),
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Any = None
    stream_options: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    tool_choice: Any = None
    text: Any = None
    truncation: Any = None
    include: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None
    prompt: Any = None


def _check_encodable(body: dict[str, Any]) -> None:
    """Raise ApiError for what Python reads, but no tokenizer takes and no answer may contain."""
    for name, value in body.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise ApiError(
                400,
                f"{name!r} has half a surrogate pair, a number that is not finite, or too many "
                f"levels: {error}",
                name,
                "invalid_value",
            ) from None


RequestT = TypeVar("RequestT", bound=GenerationFields)


def parse(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    """Read a request.

    Raises:
        ApiError: 400, naming the field that is wrong or can't be served.
    """
    _check_encodable(body)
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise ApiError.of_validation(error) from None
    request.check_refused()
    return request
