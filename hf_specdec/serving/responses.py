"""``POST /v1/responses``."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.response import ResponseHandler

from hf_specdec.serving import usage
from hf_specdec.serving.api_errors import ApiError
from hf_specdec.serving.handler import Job, RowRequest, SpeculativeHandler
from hf_specdec.serving.request_models import ResponsesRequest, parse
from hf_specdec.serving.response_items import ResponseItems
from hf_specdec.serving.rows import Row


class ResponsesHandler(SpeculativeHandler, ResponseHandler):
    """Responses, streamed or not; the conversion of ``input`` is transformers'."""

    async def handle_request(
        self, body: dict[str, Any], request_id: str
    ) -> JSONResponse | StreamingResponse:
        """Answer a request.

        Raises:
            ApiError: a request that can't be served.
        """
        request = parse(ResponsesRequest, body)
        self.served.check_name(request.model)
        tools = self._normalize_tools(request.tools)
        prompt_ids = await self.encode_messages(
            self._messages(body), tools, request.chat_template_kwargs
        )
        limit = self.served.max_new_tokens(
            request.max_output_tokens, len(prompt_ids), "max_output_tokens"
        )
        job = self.submit(request, [RowRequest(prompt_ids, limit, parses=True, tools=tools)])
        head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": time.time(),
            "model": self.served.name,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "parallel_tool_calls": bool(request.parallel_tool_calls),
            "tool_choice": "auto",
            "tools": request.tools or [],
            "metadata": request.metadata or {},
            "error": None,
            "incomplete_details": None,
        }
        if request.stream:
            events = self._stream(job, head, request_id, len(prompt_ids))
            return StreamingResponse(events, media_type="text/event-stream")
        items = ResponseItems(request_id)
        async with aclosing(job.updates()) as updates:
            async for _, update in updates:
                for piece in update.pieces:
                    items.add(piece)
        items.finish()
        return JSONResponse({**head, **_result(job.rows, items, len(prompt_ids))})

    def _messages(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """``input`` as chat messages.

        Raises:
            ApiError: 400, an item of another kind, or with a field missing.
        """
        try:
            messages = self._normalize_input(body)
            for message in messages:
                for part in message.get("content") or []:
                    if not isinstance(part, str) and "text" not in part:
                        raise ValueError(f"content of type {part.get('type')!r} is not text")
        except HTTPException as error:
            raise ApiError(400, str(error.detail), "input") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ApiError(400, f"input: {type(error).__name__}: {error}", "input") from None
        return messages

    async def _stream(
        self, job: Job, head: dict[str, Any], request_id: str, prompt_tokens: int
    ) -> AsyncGenerator[str, None]:
        number = -1

        def event(kind: str, fields: dict[str, Any]) -> str:
            nonlocal number
            number += 1
            data = json.dumps({"type": kind, "sequence_number": number, **fields})
            return f"event: {kind}\n{self.chunk_to_sse(data)}"

        items = ResponseItems(request_id)
        try:
            for status in ("created", "in_progress"):
                response = {**head, "status": "in_progress", "output": [], "usage": None}
                yield event(f"response.{status}", {"response": response})
            async for _, update in job.updates():
                for piece in update.pieces:
                    for made in items.add(piece):
                        yield event(*made)
            for made in items.finish():
                yield event(*made)
            result = {**head, **_result(job.rows, items, prompt_tokens)}
            yield event(f"response.{result['status']}", {"response": result})
        except ApiError as error:
            failure = {"code": "server_error", "message": error.message}
            response = {**head, "status": "failed", "output": [], "error": failure, "usage": None}
            yield event("response.failed", {"response": response})


def _result(rows: list[Row], items: ResponseItems, prompt_tokens: int) -> dict[str, Any]:
    """What a finished response has that an unfinished one lacks."""
    is_cut = rows[0].finish_reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items.output,
        "usage": usage.of_response(prompt_tokens, rows),
    }
