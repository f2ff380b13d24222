"""Errors in OpenAI's format, whoever raised them."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

logger = logging.getLogger(__name__)
_TYPES = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An answer other than 2xx.

    Args:
        status: HTTP status.
        message: for a person.
        param: the field of the request that is wrong, if one is.
        code: for a program, such as ``"model_not_found"``.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON that OpenAI's clients read."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)

    @classmethod
    def of_validation(cls, error: ValidationError | RequestValidationError) -> ApiError:
        """What pydantic found wrong first, with the path of the field."""
        errors = error.errors()
        # Where a field may be of several types there is an error for each; one that is not about
        # the type itself is about the type that was meant.
        first = next((e for e in errors if not e["type"].endswith("_type")), errors[0])
        if first["type"] == "json_invalid":
            reason = (first.get("ctx") or {}).get("error", "")
            return cls(400, f"The body is not JSON: {reason}".rstrip(": "), code="invalid_json")
        # Types of a union have tags such as "list[TextPart]" and "str" in the path.
        path = [str(part) for part in first["loc"] if _is_name(str(part))]
        if path[:1] == ["body"]:
            path = path[1:]
        name = ".".join(path)
        if first["type"] == "extra_forbidden":
            return cls(400, f"Unknown argument: {name}", param=name, code="unknown_parameter")
        if not name:
            return cls(400, f"The body must be a JSON object: {first['msg']}")
        given = "" if first["type"] == "missing" else f", not {_shown(first.get('input'))}"
        return cls(400, f"{name}: {first['msg']}{given}", param=name, code="invalid_value")


def _is_name(part: str) -> bool:
    return part.replace("_", "").isalnum() and part not in ("str", "int", "float", "bool")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def install(app: FastAPI) -> None:
    """Let every error of ``app`` be answered in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> JSONResponse:
        found = ApiError.of_validation(error)
        kind = request.headers.get("content-type", "")
        if "json" not in kind:
            found.message += f". Send it with Content-Type: application/json, not {kind!r}"
        return found.response()

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises it again, so that the server logs it with its traceback.
        return ApiError(500, f"{type(error).__name__}: {error}").response()
