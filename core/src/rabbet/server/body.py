"""Reads a JSON body: type, encoding, depth and shape are checked, and problems name the field."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rabbet.errors import ClientError, InvalidRequestError
from rabbet.metrics.stats import FrontStats
from rabbet.server.errors import from_validation

__all__ = ["read_body", "schema_of"]

logger = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=BaseModel)
_warned: set[str] = set()
_MAX_WARNED = 64


class _UnsupportedMediaType(ClientError):
    """The content type is not JSON."""

    status = 415


async def read_body(request: Request, model: type[_Body], stats: FrontStats) -> _Body:
    """The parsed body.

    Raises:
        ClientError: 415 for another content type, 400 for anything that is no such JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _UnsupportedMediaType("the content type must be application/json", field="Content-Type")
    raw = await request.body()
    try:
        data = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}") from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError("the body is no valid JSON: nested too deeply, or no UTF-8") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    try:
        body = model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
    unknown = getattr(body, "unknown_fields", [])
    stats.unknown_fields += len(unknown)
    for name in unknown:
        if name not in _warned and len(_warned) < _MAX_WARNED:
            _warned.add(name)
            logger.warning("the request field %r is not known and ignored", name[:64])
    return body


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a route whose body is read by hand."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
