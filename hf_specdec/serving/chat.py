"""``POST /v1/chat/completions``."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.utils import ReasoningText, ToolCall

from hf_specdec.serving import usage
from hf_specdec.serving.handler import Answer, Job, RowRequest, SpeculativeHandler
from hf_specdec.serving.request_models import ChatRequest, parse
from hf_specdec.serving.rows import Row, Update
from hf_specdec.serving.stream import chunks


class ChatHandler(SpeculativeHandler):
    """Chat completions, streamed or not."""

    async def handle_request(
        self, body: dict[str, Any], request_id: str
    ) -> JSONResponse | StreamingResponse:
        """Answer a request.

        Raises:
            ApiError: a request that can't be served.
        """
        request = parse(ChatRequest, body)
        self.served.check_name(request.model)
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        prompt_ids = await self.encode_messages(
            messages, request.tools, request.chat_template_kwargs
        )
        asked, param = request.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, param = request.max_tokens, "max_tokens"
        limit = self.served.max_new_tokens(asked, len(prompt_ids), param)
        wanted = RowRequest(prompt_ids, limit, request.n or 1, parses=True, tools=request.tools)
        job = self.submit(request, [wanted], request.stop_strings())
        head = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": self.served.name,
        }
        if request.stream:
            events = self._stream(job, request, head, len(prompt_ids))
            return StreamingResponse(events, media_type="text/event-stream")
        answers = await job.answers()
        return JSONResponse(
            {
                **head,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": index,
                        "message": _message(answer, request_id),
                        "logprobs": None,
                        "finish_reason": _finish_reason(row, bool(answer.tool_calls)),
                    }
                    for index, (answer, row) in enumerate(zip(answers, job.rows, strict=True))
                ],
                "usage": usage.of_completion(len(prompt_ids), job.rows),
            }
        )

    async def _stream(
        self, job: Job, request: ChatRequest, head: dict[str, Any], prompt_tokens: int
    ) -> AsyncGenerator[str, None]:
        head = {**head, "object": "chat.completion.chunk"}
        num_tool_calls = [0] * len(job.rows)

        def choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

        def choices(index: int, update: Update, row: Row) -> list[dict[str, Any]]:
            made = []
            for piece in update.pieces:
                delta = _delta(piece, num_tool_calls[index], f"{head['id']}-{index}")
                num_tool_calls[index] += isinstance(piece, ToolCall)
                made.append(choice(index, delta))
            if update.is_last:
                made.append(choice(index, {}, _finish_reason(row, num_tool_calls[index] > 0)))
            return made

        for index in range(len(job.rows)):
            first = choice(index, {"role": "assistant", "content": ""})
            yield self.chunk_to_sse(json.dumps({**head, "choices": [first]}))
        counts = functools.partial(usage.of_completion, prompt_tokens, job.rows)
        async for data in chunks(job, head, request.stream_options, counts, choices):
            yield self.chunk_to_sse(data)


def _finish_reason(row: Row, has_tool_calls: bool) -> str | None:
    return "tool_calls" if has_tool_calls and row.finish_reason == "stop" else row.finish_reason


def _tool_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id, "type": "function", "function": function}


def _message(answer: Answer, request_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            _tool_call(call, f"call-{request_id}-{i}") for i, call in enumerate(answer.tool_calls)
        ]
    return message


def _delta(piece: Any, num_tool_calls: int, prefix: str) -> dict[str, Any]:
    if isinstance(piece, ToolCall):
        call = _tool_call(piece, f"call-{prefix}-{num_tool_calls}")
        return {"tool_calls": [{"index": num_tool_calls, **call}]}
    if isinstance(piece, ReasoningText):
        return {"reasoning_content": str(piece)}
    return {"content": piece}
