"""The HTTP/1.1 connection: uvicorn's, with a limit on the time of a request's head, and for clients that end their side."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rabbet.server.errors import error_body, json_response
from rabbet.server.stream import PING

__all__ = ["HEAD_LIMIT_S", "Connection"]

HEAD_LIMIT_S = 30.0
_PROBE_S = 0.02
_MAX_PROBE_S = 1.0
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """Closes a connection whose request head is not complete after ``head_limit_s``.

    uvicorn has a limit on idle connections between requests, but none on the first request, nor on one that comes
    byte by byte.

    A client that has sent its request may end its side of the connection and wait, or be gone: both look the same here,
    and only writing tells them apart. So something harmless is written now and then until the answer is complete.
    """

    head_limit_s = HEAD_LIMIT_S
    _timer: asyncio.TimerHandle | None = None
    _has_eof = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; the clock runs."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Bytes came; a complete head stops the clock, the begin of a next one starts it."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        """A response is out; between requests uvicorn's limit on idle connections rules."""
        self._stop_waiting()
        super().on_response_complete()
        if self._has_eof and self.cycle.response_complete:
            # Nor is there a request that was sent ahead.
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; True keeps the connection until its answer is complete."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            # Over TLS no side can be ended alone.
            return False
        if self.scope["http_version"] != "1.1":
            return False
        if not self._has_eof:
            self._has_eof = True
            self._probe(_PROBE_S)
        return True

    def _probe(self, wait_s: float) -> None:
        """Write to a client that may be gone; the second write fails if it is."""
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if not cycle.response_started:
            event: Any = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(event) or b"")
        elif not cycle.response_complete and cycle.scope["state"].get("is_event_stream"):
            self.transport.write(self.conn.send(h11.Data(data=PING)) or b"")
        self.loop.call_later(wait_s, self._probe, min(2 * wait_s, _MAX_PROBE_S))

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the shape that all errors have."""
        body = bytes(json_response(error_body(msg, status=400)).body)
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        events: list[Any] = [h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body)]
        for event in (*events, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An offer to speak something else is not taken up, which HTTP allows; the log need not tell."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        loop: Any = self.loop
        self._timer = loop.call_later(self.head_limit_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()
