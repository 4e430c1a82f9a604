"""What stands before every route: paths, keys, body sizes, request ids. Plain ASGI, decided on the scope alone."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rabbet.server.errors import error_response

__all__ = ["PUBLIC_PATHS", "Guard"]

PUBLIC_PATHS = ("/health", "/ping", "/ready", "/version")
"""What answers without a key; everything else needs one if keys are configured."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_SLASHES = re.compile(r"/{2,}")


class Guard:
    """One layer: collapses double slashes, checks the key, bounds the body, names the request."""

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int, root_path: str, echo_request_id: bool
    ) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._root_path = root_path.rstrip("/")
        self._echo = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = dict(scope)
        path = _SLASHES.sub("/", scope["path"])
        scope["path"] = path.rstrip("/") or "/" if path != "/" else path
        scope["raw_path"] = scope["path"].encode("utf-8", "surrogatepass")
        request_id = self._request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        bare = scope["path"].removeprefix(self._root_path) if self._root_path else scope["path"]
        if self._keys and bare not in PUBLIC_PATHS and scope["method"] != "OPTIONS" and not self._is_allowed(scope):
            response = error_response(
                "a valid API key is needed: Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        declared = _content_length(scope)
        if declared is not None and declared > self._max_body_bytes:
            await self._too_large(scope, receive, send)
            return
        await self._bounded(scope, receive, self._with_id(send, request_id))

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; a body that grows beyond the limit is answered with 413 before the rest is read."""
        received = 0
        started = False

        async def count() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_bytes:
                    raise _BodyTooLarge
            return message

        async def note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, count, note)
        except _BodyTooLarge:
            if not started:
                await self._too_large(scope, receive, send)

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(
            f"the body is larger than {self._max_body_bytes} bytes", status=413, headers={"Connection": "close"}
        )
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1 or values[0][:7].lower() != b"bearer ":
            return False
        digest = hashlib.sha256(values[0][7:].strip()).digest()
        # Every key is compared, so that the time does not tell which one was near.
        return any([hmac.compare_digest(digest, key) for key in self._keys])  # noqa: C419

    @staticmethod
    def _request_id(scope: Scope) -> str:
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return str(value.decode("ascii"))
        return secrets.token_hex(16)

    def _with_id(self, send: Send, request_id: str) -> Send:
        if not self._echo:
            return send

        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: list[Any] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("ascii"))]
                message = {**message, "headers": headers}
            await send(message)

        return wrapped


class _BodyTooLarge(Exception):
    """The body passed the limit while it was read."""


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None
