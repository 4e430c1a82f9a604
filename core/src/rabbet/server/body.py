"""Reads a JSON body: type, encoding, depth and shape are checked, and problems name the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rabbet.errors import ClientError, InvalidRequestError
from rabbet.server.errors import from_validation
from rabbet.server.state import ServerState

__all__ = ["Early", "body_size", "read_body", "schema_of"]

_Body = TypeVar("_Body", bound=BaseModel)
_MAX_DEPTH = 128
_LARGE_BYTES = 64 << 10
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

Early = Callable[[dict[str, msgspec.Raw], ServerState], None]
"""Refuses the fields of a large body by a look at their text, before objects are made of it."""


class _UnsupportedMediaType(ClientError):
    """The content type is not JSON, or the body is packed."""

    status = 415


async def read_body(request: Request, model: type[_Body], state: ServerState, *, early: Early | None = None) -> _Body:
    """The parsed body.

    Args:
        request: Whose body it is.
        model: What it must be.
        state: The server's.
        early: Cheap checks of a large body.

    Raises:
        ClientError: 415 for another content type, 400 for anything that is no such JSON object.
    """
    headers = request.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _UnsupportedMediaType("the content type must be application/json", field="Content-Type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _UnsupportedMediaType("the body must not be compressed", field="Content-Encoding")
    raw = await request.body()
    data = _decode(raw, lambda fields: early(fields, state) if early is not None else None)
    try:
        body = model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
    state.note_unknown(getattr(body, "unknown_fields", []))
    return body


def body_size(request: Request) -> int:
    """Bytes of a body that was read."""
    # Starlette keeps what ``body`` read.
    return len(getattr(request, "_body", b""))


def _decode(raw: bytes, look: Callable[[dict[str, msgspec.Raw]], None]) -> dict[str, Any]:
    try:
        if len(raw) > _LARGE_BYTES and raw.lstrip()[:1] == b"{":
            look(_fields.decode(raw))
        data = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}") from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError("the body is no valid JSON: nested too deeply, or no UTF-8") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    # Counting brackets is fast, and few brackets cannot nest deeply; only bodies with many are walked through.
    if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH and _is_deeper(data, _MAX_DEPTH):
        raise InvalidRequestError(f"the body is nested too deeply; the limit is {_MAX_DEPTH} levels")
    return data


def _is_deeper(data: Any, limit: int) -> bool:
    """Whether containers are nested more than ``limit`` times; level by level, so that depth costs no stack."""
    level = [data]
    for _ in range(limit):
        inner: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            inner += [item for item in items if type(item) in (dict, list)]
        if not inner:
            return False
        level = inner
    return True


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a route whose body is read by hand; nested models are written out in place."""
    schema = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
