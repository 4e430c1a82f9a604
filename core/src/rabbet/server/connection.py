"""The HTTP/1.1 connection: uvicorn's, with a limit on the time that a client may take to send a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_LIMIT_S", "Connection"]

HEAD_LIMIT_S = 30.0
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """Closes a connection whose request head is not complete after ``head_limit_s``.

    uvicorn has a limit on idle connections between requests, but none on the first request, nor on one that comes
    byte by byte.
    """

    head_limit_s = HEAD_LIMIT_S
    _timer: asyncio.TimerHandle | None = None

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
