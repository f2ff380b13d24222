"""The server process: uvicorn, stopping without dropping what it has begun."""

from __future__ import annotations

import logging
import time
from types import FrameType
from typing import Any

import uvicorn

from hf_specdec.serving.app import Application

# uvicorn's own, whose level and format the server sets.
logger = logging.getLogger("uvicorn.error")
# Tenths of a second between log lines.
_LOG_TICKS = 100
# What uvicorn waits for its connections, once their requests are answered or given up.
_CLOSING_SECONDS = 2


class SpeculationServer(uvicorn.Server):
    """Serves an `Application` until it is told to stop.

    The first SIGTERM or SIGINT closes the gate: requests that are inside are finished, new ones
    are answered with 503. A second signal, or the end of the patience, cancels what is left.

    Args:
        application: the engine is started and stopped with the server.
        host: address to listen at.
        port: 0 takes a free one.
        shutdown_timeout: seconds that running requests may take to finish.
        log_level: of uvicorn.
    """

    def __init__(
        self,
        application: Application,
        host: str = "127.0.0.1",
        port: int = 8000,
        shutdown_timeout: float = 60.0,
        log_level: str = "info",
    ):
        gate: Any = application.gate
        config = uvicorn.Config(
            gate,
            host=host,
            port=port,
            log_level=log_level,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        super().__init__(config)
        self._application = application
        self._shutdown_timeout = shutdown_timeout
        self._give_up_at: float | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Start the engine, and listen."""
        self._application.engine.start()
        await super().startup(sockets)

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop the engine, and listening."""
        self._application.engine.stop()
        await super().shutdown(sockets)

    def drain(self) -> None:
        """Finish what is running, take nothing new, then stop; may be called from any thread."""
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + self._shutdown_timeout
            self._application.gate.is_closed = True
            logger.info("stopping: %d requests to finish", self._application.gate.num_inside)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See the class."""
        if self._give_up_at is None:
            self.drain()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to stop."""
        if self._give_up_at is not None:
            is_idle = self._application.gate.num_inside == 0
            if is_idle or time.monotonic() > self._give_up_at:
                self.should_exit = True
        if counter % _LOG_TICKS == 0 and (line := self._application.telemetry.log_line()):
            logger.info(line)
        return await super().on_tick(counter)

    @property
    def address(self) -> str:
        """``http://host:port``, of a server that has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"
