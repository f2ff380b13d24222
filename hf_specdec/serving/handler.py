"""From a request to rows, and from their updates to an answer: what all endpoints share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from transformers.cli.serving.utils import (
    BaseHandler,
    GenerationState,
    Modality,
    ReasoningText,
    ToolCall,
    build_response_parser,
)

from hf_specdec.serving.api_errors import ApiError
from hf_specdec.serving.engine import Engine, QueueFullError
from hf_specdec.serving.gate import when_done
from hf_specdec.serving.request_models import GenerationFields
from hf_specdec.serving.row_text import RowText
from hf_specdec.serving.rows import Row, Update
from hf_specdec.serving.sampling import Sampling
from hf_specdec.serving.served_model import ServedModel

_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass
class Answer:
    """A finished row's text.

    Attributes:
        content: what the model says.
        reasoning: what it thought before, if transformers can tell the two apart.
        tool_calls: the tools it calls.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Sequence[Any]) -> None:
        """Append pieces of `RowText.release`."""
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self.tool_calls.append(piece)
            elif isinstance(piece, ReasoningText):
                self.reasoning += piece
            else:
                self.content += piece


@dataclass(frozen=True)
class RowRequest:
    """What a handler wants generated: one row for each of ``num_choices``.

    Attributes:
        prompt_ids: the prompt.
        max_new_tokens: the limit.
        num_choices: texts for this prompt.
        parses: whether tool calls and reasoning are taken out of the text.
        tools: the tools that the request offers, for the parser.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    num_choices: int = 1
    parses: bool = False
    tools: list[dict[str, Any]] | None = None


class Job:
    """The rows of one request, and the stream of their updates.

    Args:
        engine: generates them.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self.rows: list[Row] = []

    def deliver(self, index: int, update: Update) -> None:
        """Hand over an update; called in the engine's thread."""
        # A closed loop: the server has stopped, and nobody is waiting.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, update))

    def submit(self) -> None:
        """Put the rows in the engine's queue.

        Raises:
            ApiError: 503, the queue is full.
        """
        try:
            self._engine.submit(self.rows)
            when_done(self.cancel)
        except QueueFullError as error:
            raise ApiError(
                503, f"The server is busy: {error}", code="queue_full", headers={"Retry-After": "1"}
            ) from None

    def cancel(self) -> None:
        """Stop generating; harmless for rows that are finished."""
        for row in self.rows:
            row.cancelled = True

    async def updates(self) -> AsyncGenerator[tuple[int, Update], None]:
        """Every update, with the index of its row; leaving early cancels the rows.

        Raises:
            ApiError: 500, a row has failed; 503, the engine was stopped.
        """
        left = len(self.rows)
        try:
            while left:
                index, update = await self._queue.get()
                if update.is_last and self.rows[index].cancelled:
                    # Not by this request's client, or nobody would be here.
                    raise ApiError(503, "The server is stopping", code="server_stopping")
                if update.error is not None:
                    raise ApiError(500, update.error)
                yield index, update
                left -= update.is_last
        finally:
            if left:
                self.cancel()

    async def answers(self) -> list[Answer]:
        """Wait for all rows."""
        answers = [Answer() for _ in self.rows]
        async with aclosing(self.updates()) as updates:
            async for index, update in updates:
                answers[index].add(update.pieces)
        return answers


class SpeculativeHandler(BaseHandler):
    """transformers' handler, whose requests become rows of shared batches.

    Args:
        served: the model.
        engine: generates.
        chat_template_kwargs: defaults for the chat template.
    """

    def __init__(
        self,
        served: ServedModel,
        engine: Engine,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__(served, GenerationState(), chat_template_kwargs)  # type: ignore[arg-type]
        self.served = served
        self.engine = engine

    def submit(
        self,
        request: GenerationFields,
        wanted: Sequence[RowRequest],
        stop: Sequence[str] = (),
    ) -> Job:
        """Make the rows of a request and queue them.

        Raises:
            ApiError: 400, settings that don't work; 503, the queue is full.
        """
        served, engine = self.served, self.engine
        config = served.target.generation_config
        sampling = Sampling.of_request(request, config, served.vocab_size)
        num_rows = sum(want.num_choices for want in wanted)
        if num_rows > engine.max_waiting:
            raise ApiError(
                400,
                f"The request asks for {num_rows} texts, and this server queues at most "
                f"{engine.max_waiting}. Send several requests",
                "n",
                "too_many_choices",
            )
        job = Job(engine)
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        for want in wanted:
            for _ in range(want.num_choices):
                index = len(job.rows)
                parser = None
                if want.parses:
                    parser = build_response_parser(
                        served.tokenizer, served.target, want.prompt_ids, tools=want.tools
                    )
                job.rows.append(
                    Row(
                        want.prompt_ids,
                        want.max_new_tokens,
                        sampling,
                        _row_seed(seed, index),
                        RowText(served.tokenizer, stop, parser, engine.end_ids),
                        lambda update, index=index: job.deliver(index, update),  # type: ignore[misc]
                        streams=bool(request.stream),
                    )
                )
        job.submit()
        return job

    async def encode_messages(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> list[int]:
        """Messages in OpenAI's format through the chat template."""
        kwargs = {**self.chat_template_kwargs, **(template_kwargs or {})}
        try:
            inputs = self.get_processor_inputs_from_messages(messages, Modality.LLM)
        except (KeyError, TypeError, ValueError) as error:
            raise ApiError(400, f"messages: {type(error).__name__}: {error}", "messages") from None
        token_ids = await self.served.beside(lambda: self.served.encode_chat(inputs, tools, kwargs))
        self.served.check_prompt(token_ids, "messages")
        return token_ids


def _row_seed(seed: int, index: int) -> int:
    """A seed for each row of a request, within int64; the first has the request's own."""
    value = (seed + index * _SEED_STEP) % 2**64
    return value - 2**64 if value >= 2**63 else value
