"""The gate in front of the application: who comes in, who is still inside, who has left.

Plain ASGI. A client that hangs up has its request's task cancelled, streaming or not, and whatever
was begun for it is told (`when_done`). While the server is stopping, nobody new comes in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from hf_specdec.serving.api_errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
_GENERATES = "/v1/"
_callbacks: ContextVar[list[Callable[[], None]] | None] = ContextVar("callbacks", default=None)


def when_done(callback: Callable[[], None]) -> None:
    """Call back when the request that is being answered is done with, however it ends.

    For what a request begins and must not leave behind; a stream that is never read has no end of
    its own. Outside of a `Gate` nothing is called.
    """
    callbacks = _callbacks.get()
    if callbacks is not None:
        callbacks.append(callback)


class Gate:
    """An ASGI application around another one.

    Args:
        app: what answers.
        on_error: called with the status of every answer of 400 and above.
    """

    def __init__(self, app: Application, on_error: Callable[[int], None] = lambda status: None):
        self._app = app
        self._on_error = on_error
        self.is_closed = False
        """Whether new requests are refused with 503."""
        self.num_inside = 0
        """Requests that are being answered."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection event, as ASGI defines it."""
        is_request = scope["type"] == "http" and scope["method"] == "POST"
        if not is_request or not scope["path"].startswith(_GENERATES):
            await self._app(scope, receive, send)
            return
        if self.is_closed:
            headers = {"Retry-After": "30", "Connection": "close"}
            error = ApiError(503, "The server is stopping", code="server_stopping", headers=headers)
            self._on_error(503)
            await error.response()(scope, receive, send)
            return
        self.num_inside += 1
        try:
            await self._serve(scope, receive, send)
        finally:
            self.num_inside -= 1

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        messages: asyncio.Queue[Message] = asyncio.Queue()
        is_answered = False

        async def listen() -> None:
            # Somebody has to keep listening, or nobody hears the client hang up.
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "http.disconnect":
                    return

        async def watched_send(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._on_error(message["status"])
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_answered = True
            await send(message)

        callbacks: list[Callable[[], None]] = []
        # The tasks that this one starts inherit it.
        _callbacks.set(callbacks)
        listener = asyncio.ensure_future(listen())
        work = asyncio.ensure_future(self._app(scope, messages.get, watched_send))
        try:
            await asyncio.wait({listener, work}, return_when=asyncio.FIRST_COMPLETED)
            has_left = not work.done() and not is_answered
            if has_left:
                work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                if not has_left:
                    raise
        finally:
            listener.cancel()
            if not work.done():
                work.cancel()
            for callback in callbacks:
                callback()
