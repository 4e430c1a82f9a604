"""What stands before every route: hosts, paths, keys, body sizes, request ids. Plain ASGI, decided on the scope alone."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rabbet.config.schema import ServerConfig
from rabbet.errors import ClientError
from rabbet.server.errors import error_response
from rabbet.server.protocol import REQUEST_ID

__all__ = ["BODY_LIMIT_S", "MAX_HEAD_BYTES", "PUBLIC_PATHS", "Guard"]

PUBLIC_PATHS = frozenset(("/health", "/ping", "/ready", "/version"))
"""What answers without a key: probes, and what a probe may compare. Everything else needs a key if there are any."""

BODY_LIMIT_S = 120.0
MAX_HEAD_BYTES = 64 << 10
"""Of a request's target and headers."""
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/]*)")
_SLASHES = re.compile(r"/{2,}")


class _BodyTooLargeError(ClientError):
    """The body passed the limit."""

    status = 413


class _BodyTooSlowError(ClientError):
    """The body did not arrive in time."""

    status = 408


class Guard:
    """One layer: collapses double slashes, checks host and key, bounds the body in size and time, names the request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        on_response: Callable[[str, int], None],
        body_limit_s: float = BODY_LIMIT_S,
    ) -> None:
        """Guard an application.

        Args:
            app: What comes behind.
            config: Keys, limits, root path.
            on_response: Told the route's template and the status of each response.
            body_limit_s: Seconds that a body may take to arrive.
        """
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_key]
        self._hosts = _allowed_hosts(config)
        self._max_body_bytes = config.max_body_bytes
        self._root_path = config.root_path.rstrip("/")
        self._echoes_id = config.enable_request_id_headers
        self._has_cors = bool(config.allowed_origins)
        self._on_response = on_response
        self._body_limit_s = body_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "websocket":
            # No route speaks it, and a page of any origin may open one.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = dict(scope)
        path = scope["path"]
        if (absolute := _ABSOLUTE.match(path)) is not None:
            # As to a proxy, and to be understood by every server; its host has to be one of ours like that of the header.
            path = path[absolute.end() :]
            name = absolute[1].rpartition("@")[2].encode("utf-8", "replace")
            scope["headers"] = [*scope["headers"], (b"host", name)]
        path = _SLASHES.sub("/", path)
        scope["path"] = path.rstrip("/") or "/"
        scope["root_path"] = self._root_path
        scope["raw_path"] = scope["path"].encode("utf-8", "surrogatepass")
        scope.setdefault("state", {})["request_id"] = request_id = _request_id(scope)
        send = self._noting(scope, send, request_id)
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """The answer to what must not reach the routes."""
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            # A proxy that believes the other one would take the rest for the request of somebody else.
            text = "the body has both a Content-Length and a Transfer-Encoding; send one"
            return error_response(text, status=400, param="Content-Length", headers={"Connection": "close"})
        if _head_size(scope) > MAX_HEAD_BYTES:
            text = f"target and headers are larger than {MAX_HEAD_BYTES} bytes"
            return error_response(text, status=431, headers={"Connection": "close"})
        if self._hosts is not None and not _is_host_of(scope, self._hosts):
            return error_response(
                "the server does not answer for this Host header; name the host with --allowed-hosts if it is yours",
                status=403,
                param="Host",
                code="host_not_allowed",
            )
        if self._keys and not self._is_public(scope) and not self._has_key(scope):
            return error_response(
                "a valid API key is needed: Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            return error_response(self._too_large(), status=413, headers={"Connection": "close"})
        return None

    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes (--max-body-bytes)"

    def _is_public(self, scope: Scope) -> bool:
        path = scope["path"]
        if self._root_path and path.startswith(f"{self._root_path}/"):
            path = path[len(self._root_path) :]
        # A preflight carries no key, by the rules of CORS.
        return path in PUBLIC_PATHS or (scope["method"] == "OPTIONS" and self._has_cors)

    def _has_key(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1 or values[0][:7].lower() != b"bearer ":
            return False
        digest = hashlib.sha256(values[0][7:].strip()).digest()
        # Every key is compared, so that the time does not tell which one was near.
        return any([hmac.compare_digest(digest, key) for key in self._keys])  # noqa: C419

    def _bounded(self, receive: Receive) -> Receive:
        """Receive a body until it is complete, too large or too slow; after that, without limits."""
        received = 0
        is_complete = False
        deadline = asyncio.get_running_loop().time() + self._body_limit_s

        async def bounded() -> Message:
            nonlocal received, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _BodyTooSlowError(f"the body took longer than {self._body_limit_s:g} s to arrive") from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if received > self._max_body_bytes:
                    raise _BodyTooLargeError(self._too_large())
            return message

        return bounded

    def _noting(self, scope: Scope, send: Send, request_id: str) -> Send:
        """Send, and note the status; with the request's id where the operator wants it."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unmatched")
                self._on_response(route, message["status"])
                headers = list(message.get("headers", ()))
                if self._echoes_id:
                    headers.append((b"x-request-id", request_id.encode("ascii")))
                if message["status"] in (408, 413):
                    # The rest of the body is not worth reading.
                    headers = [(name, value) for name, value in headers if name.lower() != b"connection"]
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        return noting


def _head_size(scope: Scope) -> int:
    """Bytes of target and headers, with what separates them."""
    headers = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return headers + len(scope["path"]) + len(scope["query_string"])


def _request_id(scope: Scope) -> str:
    """The client's name for the request if it is harmless, else one of ours. It is never a key of anything."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(text := value.decode("latin-1")):
            return str(text)
    return secrets.token_hex(16)


def _allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Names that a Host header may hold beside those of loopback; None is any.

    A server on a loopback address trusts whoever is on this machine, and a web page is not: its name may be made to
    point here (DNS rebinding), and then the browser takes it for the same origin. It still sends its own name.
    """
    if "*" in config.allowed_hosts or (config.uds and not config.allowed_hosts):
        return None
    if not config.allowed_hosts and not _is_loopback((config.host or "").lower()):
        return None
    return frozenset(_host_name(name) for name in (*config.allowed_hosts, config.host or "localhost"))


def _is_host_of(scope: Scope, allowed: frozenset[str]) -> bool:
    """Whether every Host header is allowed. Without one it is no browser, and HTTP/1.0 has none."""
    names = [_host_name(value.decode("latin-1")) for name, value in scope["headers"] if name == b"host"]
    return all(name in allowed or _is_loopback(name) for name in names)


def _host_name(value: str) -> str:
    """The name or address without port, brackets and the dot at the end."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return (value if value.count(":") > 1 else value.partition(":")[0]).removesuffix(".")


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
