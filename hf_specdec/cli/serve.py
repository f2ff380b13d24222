"""The work of `hf-specdec serve`: load the pair once, then serve it."""

from __future__ import annotations

import errno
import importlib.util
import re
import socket
from dataclasses import dataclass
from typing import Any

from hf_specdec.cli.options import PairSettings

UNKNOWN_POSITIONS = 131_072
"""Tokens of the longest text of a model whose config names no limit: memory has one, and a request
for a billion tokens is to be refused before anything is allocated for it."""
_NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "jinja2")


@dataclass(frozen=True)
class ServeSettings:
    """See the options of the command; times in seconds."""

    pair: PairSettings
    host: str
    port: int
    served_model_name: str
    max_model_len: int | None
    default_max_tokens: int
    max_batch_size: int
    batch_wait: float
    max_waiting: int
    concurrent_batches: int
    chat_template_kwargs: dict[str, Any]
    shutdown_timeout: float
    metrics_prefix: str
    enable_cors: bool
    log_level: str


def run_serve(settings: ServeSettings) -> None:
    """Serve until a signal says to stop.

    Raises:
        ValueError: a package or a drafter is missing, or a setting doesn't fit the model.
        OSError: a model that can't be loaded.
    """
    _check(settings)
    from hf_specdec.cli.pairs import load_pair

    pair = load_pair(settings.pair)
    make_server(pair.target, pair.tokenizer, settings).run()


def _check(settings: ServeSettings) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"serving needs packages that are not installed ({', '.join(missing)}). "
            'Install them with: pip install "hf-specdec[serving]"'
        )
    if settings.pair.speculative_config is None:
        raise ValueError(
            f"no drafter for {settings.pair.target}: name one with --spec-model DRAFTER or "
            "--speculative-config, or use the target's own MTP layers with --spec-method mtp"
        )
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", settings.metrics_prefix):
        raise ValueError(
            f"--metrics-prefix {settings.metrics_prefix!r} must consist of letters, digits and _"
        )
    _check_address(settings.host, settings.port)


def _check_address(host: str, port: int) -> None:
    """Raise ValueError for an address that can't be listened at, before models are loaded."""
    works, failure = False, OSError(errno.EADDRNOTAVAIL, "no such address")
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        places, failure = [], error
    for family, _, _, _, address in places:
        try:
            socket.create_server(address[:2], family=family).close()
            works = True
        except OSError as error:
            failure = error
    # A name may have an address of a family that this machine doesn't use, but not a taken one.
    if not works or failure.errno == errno.EADDRINUSE:
        raise ValueError(
            f"--host {host} --port {port}: can't listen there ({failure.strerror}). Name an "
            "address of this machine and a free port; --port 0 takes one"
        )


def make_server(target: Any, tokenizer: Any, settings: ServeSettings) -> Any:
    """A `SpeculationServer` for a loaded target, to be run.

    Raises:
        ValueError: a setting that doesn't fit the model or its tokenizer.

    Args:
        target: with its drafter attached.
        tokenizer: of the target.
        settings: everything but ``pair``.
    """
    from hf_specdec.serving.app import build_application
    from hf_specdec.serving.engine import BatchingLimits
    from hf_specdec.serving.served_model import ServedModel
    from hf_specdec.serving.server import SpeculationServer

    positions = _positions(target, settings.max_model_len)
    served = ServedModel(
        target, tokenizer, settings.served_model_name, positions, settings.default_max_tokens
    )
    if own := served.own_template_kwargs(settings.chat_template_kwargs):
        raise ValueError(f"--chat-template-kwargs has {own}, which the server sets itself")
    limits = BatchingLimits(
        settings.max_batch_size,
        settings.batch_wait,
        settings.max_waiting,
        positions,
        settings.concurrent_batches,
    )
    application = build_application(
        served,
        limits,
        settings.metrics_prefix,
        settings.enable_cors,
        settings.chat_template_kwargs,
    )
    return SpeculationServer(
        application, settings.host, settings.port, settings.shutdown_timeout, settings.log_level
    )


def _positions(target: Any, max_model_len: int | None) -> int:
    """Tokens of the longest text; `UNKNOWN_POSITIONS` where neither setting nor config says.

    Raises:
        ValueError: more are asked for than the model has positions.
    """
    config = target.config.get_text_config(decoder=True)
    own = getattr(config, "max_position_embeddings", None)
    if max_model_len is None or own is None:
        return max_model_len or own or UNKNOWN_POSITIONS
    if max_model_len > own:
        raise ValueError(f"--max-model-len {max_model_len}: the model has {own} positions")
    return max_model_len
