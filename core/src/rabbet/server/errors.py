"""Every error in OpenAI's shape, with fixed texts for what is our fault: no path, address or trace leaves the server."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rabbet.errors import (
    ClientError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestFailedError,
    shorten,
)

__all__ = [
    "ShuttingDownError",
    "describe",
    "error_body",
    "error_response",
    "from_exception",
    "from_validation",
    "json_response",
    "model_not_found",
]

logger = logging.getLogger(__name__)
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    431: "invalid_request_error", 429: "overloaded_error", 500: "server_error", 503: "service_unavailable_error",
}  # fmt: skip
_encoder = msgspec.json.Encoder()
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}|File \"[^\"]*\"")
_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.@+-]+/)+[\w.@+-]*")
"""A second net under texts that should not hold such things; a client error may show a path that the client sent."""


class ShuttingDownError(EngineDeadError):
    """What running requests get that are cut because the server stops."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON bytes, encoded once."""
    return Response(_encoder.encode(content), status_code=status, media_type="application/json", headers=headers)


def error_body(message: str, *, status: int, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    clean = _ADDRESS.sub("...", message)
    if status >= 500:
        clean = _PATH.sub("...", clean)
    return {
        "error": {"message": clean, "type": _TYPES.get(status, "server_error"), "param": param, "code": code or status}
    }


def error_response(
    message: str,
    *,
    status: int,
    param: str | None = None,
    code: str | int | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """The response for one error."""
    return json_response(error_body(message, status=status, param=param, code=code), status, headers)


def describe(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an exception; of a group from several prompts, the first one's."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ClientError):
        body = error_body(str(error), status=error.status, param=error.field, code=error.code)
        return error.status, body, {}
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(error.retry_after_s)}
        return 503, error_body(str(error), status=503, code="overloaded"), headers
    if isinstance(error, ShuttingDownError):
        return 503, error_body("the server is shutting down", status=503, code="shutting_down"), {"Retry-After": "10"}
    if isinstance(error, EngineDeadError):
        return 503, error_body("the engine is not available", status=503, code="engine_dead"), {}
    if isinstance(error, RequestFailedError):
        return 500, error_body(str(error), status=500, code="request_failed"), {}
    if isinstance(error, ClientDisconnect):
        # Nobody reads the answer; a client that leaves is no fault of ours.
        return 400, error_body("the client left before its request was complete", status=400), {}
    error_id = secrets.token_hex(6)
    logger.error("error %s", error_id, exc_info=error)
    return 500, error_body(f"internal error; its id in the server's log is {error_id}", status=500), {}


def from_exception(error: BaseException) -> Response:
    """The response for an exception."""
    status, body, headers = describe(error)
    return json_response(body, status, headers)


def from_validation(error: ValidationError) -> InvalidRequestError:
    """The first problem of a body, as a client error that names the field."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = [item for item in problem["loc"] if not (isinstance(item, str) and ("[" in item or item in _PLAIN_TYPES))]
    field = str(place[0]) if place else None
    path = ".".join(str(item) for item in place) or "the body"
    text = f"{path} is {shorten(problem.get('input'))}: {_lowered(problem['msg'])}"
    if problem["type"] == "missing":
        text = f"{path} is missing"
    return InvalidRequestError(text, field=field)


_PLAIN_TYPES = ("str", "int", "float", "bool")


def _lowered(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def model_not_found(name: str, known: tuple[str, ...]) -> ModelNotFoundError:
    """The error for a model that is not served."""
    return ModelNotFoundError(f"the model {shorten(name)} is not served here; served: {', '.join(known)}", value=name)
