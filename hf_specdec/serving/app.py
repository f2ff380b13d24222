"""The application: transformers' own, with our handlers behind its routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from hf_specdec.serving import api_errors, telemetry
from hf_specdec.serving.api_errors import ApiError
from hf_specdec.serving.chat import ChatHandler
from hf_specdec.serving.completions import CompletionHandler
from hf_specdec.serving.engine import BatchingLimits, Engine
from hf_specdec.serving.gate import Gate
from hf_specdec.serving.responses import ResponsesHandler
from hf_specdec.serving.served_model import ServedModel
from hf_specdec.serving.telemetry import Telemetry

# Of transformers' routes. The others load models, unload them, or serve models of other kinds.
_ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"}
_DOCUMENTATION = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}


@dataclass(frozen=True)
class Application:
    """What a server runs.

    Attributes:
        gate: the ASGI application.
        engine: generates; not started yet.
        telemetry: counts.
    """

    gate: Gate
    engine: Engine
    telemetry: Telemetry


def build_application(
    served: ServedModel,
    limits: BatchingLimits,
    metrics_prefix: str = "hf_specdec",
    enable_cors: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Application:
    """Put a server together.

    Args:
        served: the model, with its drafter attached.
        limits: how rows are batched.
        metrics_prefix: of the names in ``/metrics``.
        enable_cors: let pages of other origins call the server.
        chat_template_kwargs: defaults for the chat template.
    """
    counts = Telemetry(served.name, metrics_prefix)
    engine = Engine(served.target, served.tokenizer.pad_token_id or 0, limits, counts)
    counts.num_waiting = lambda: engine.num_waiting
    counts.num_running = lambda: engine.num_running
    arguments = (served, engine, chat_template_kwargs)
    # Named there by transformers' classes; what it calls is handle_request and list_models.
    models: Any = served
    chat: Any = ChatHandler(*arguments)
    completions: Any = CompletionHandler(*arguments)
    nobody: Any = None
    app = build_server(
        models,
        chat_handler=chat,
        completion_handler=completions,
        response_handler=ResponsesHandler(*arguments),
        transcription_handler=nobody,
        systemone_handler=nobody,
        generation_state=GenerationState(),
        enable_cors=enable_cors,
    )
    kept = _ROUTES | _DOCUMENTATION
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) in kept]
    api_errors.install(app)
    gate = Gate(app, counts.request_refused)
    _add_routes(app, served, engine, counts, gate)
    return Application(gate, engine, counts)


def _add_routes(
    app: FastAPI, served: ServedModel, engine: Engine, counts: Telemetry, gate: Gate
) -> None:
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        served.check_name(name)
        return JSONResponse(served.list_models()[0])

    @app.get("/health")
    async def health() -> JSONResponse:
        if gate.is_closed:
            raise ApiError(503, "The server is stopping", code="server_stopping")
        if not engine.is_alive:
            raise ApiError(503, "The engine's thread is not running", code="engine_dead")
        state = {"running": engine.num_running, "waiting": engine.num_waiting}
        return JSONResponse({"status": "ok", **state})

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(counts.text(), media_type=telemetry.CONTENT_TYPE)
