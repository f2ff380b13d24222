"""``POST /v1/completions``."""

from __future__ import annotations

import functools
import time
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse

from hf_specdec.serving import usage
from hf_specdec.serving.handler import RowRequest, SpeculativeHandler
from hf_specdec.serving.request_models import CompletionRequest, parse
from hf_specdec.serving.rows import Row, Update
from hf_specdec.serving.stream import chunks


class CompletionHandler(SpeculativeHandler):
    """Text completions, streamed or not."""

    async def handle_request(
        self, body: dict[str, Any], request_id: str
    ) -> JSONResponse | StreamingResponse:
        """Answer a request; the choices of prompt i begin at index ``i * n``.

        Raises:
            ApiError: a request that can't be served.
        """
        request = parse(CompletionRequest, body)
        self.served.check_name(request.model)
        prompts = await self._prompts(request)
        wanted = [
            RowRequest(
                ids,
                self.served.max_new_tokens(request.max_tokens, len(ids), "max_tokens"),
                request.n or 1,
            )
            for ids in prompts
        ]
        job = self.submit(request, wanted, request.stop_strings())
        head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.served.name,
        }
        counts = functools.partial(usage.of_completion, sum(map(len, prompts)), job.rows)
        if request.stream:
            data = chunks(job, head, request.stream_options, counts, _choices)
            events = (self.chunk_to_sse(item) async for item in data)
            return StreamingResponse(events, media_type="text/event-stream")
        answers = await job.answers()
        choices = [
            _choice(index, answer.content, row.finish_reason)
            for index, (answer, row) in enumerate(zip(answers, job.rows, strict=True))
        ]
        return JSONResponse({**head, "choices": choices, "usage": counts()})

    async def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        """The prompts' token ids; ``prompt`` may be a text, ids, or a list of either."""
        prompt: Any = request.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        encoded = await self.served.beside(
            lambda: [self.served.encode(p) if isinstance(p, str) else list(p) for p in prompt]
        )
        for ids in encoded or [[]]:
            self.served.check_prompt(ids, "prompt")
        return encoded


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _choices(index: int, update: Update, row: Row) -> list[dict[str, Any]]:
    text = "".join(update.pieces)
    return [_choice(index, text, row.finish_reason if update.is_last else None)]
