"""A stream of chunks: the choices of a completion in turn, and where its usage goes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from hf_specdec.serving.api_errors import ApiError
from hf_specdec.serving.handler import Job
from hf_specdec.serving.request_models import StreamOptions
from hf_specdec.serving.rows import Row, Update


async def chunks(
    job: Job,
    head: dict[str, Any],
    options: StreamOptions | None,
    usage: Callable[[], dict[str, Any]],
    choices: Callable[[int, Update, Row], list[dict[str, Any]]],
) -> AsyncGenerator[str, None]:
    """The data of a stream of completions, without what comes first.

    With ``stream_options.include_usage`` the usage is a chunk of its own, without choices, as at
    OpenAI. Where a request doesn't say, it is in the chunk of the last choice that ends, so that
    clients that read ``chunk.choices[0]`` of every chunk find one.

    Args:
        job: has been submitted.
        head: what all chunks have.
        options: the request's.
        usage: makes the usage block, once all rows are finished.
        choices: makes the choices that tell an update of a row; the last one ends it if the
            update does.
    """
    include = None if options is None else options.include_usage
    left = len(job.rows)
    try:
        async for index, update in job.updates():
            made = choices(index, update, job.rows[index])
            left -= update.is_last
            for position, choice in enumerate(made, start=1):
                chunk: dict[str, Any] = {**head, "choices": [choice]}
                if include:
                    chunk["usage"] = None
                elif include is None and left == 0 and position == len(made):
                    chunk["usage"] = usage()
                yield json.dumps(chunk)
        if include:
            yield json.dumps({**head, "choices": [], "usage": usage()})
    except ApiError as error:
        yield json.dumps(error.body())
    yield "[DONE]"
