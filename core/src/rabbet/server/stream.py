"""Server-sent events, and the two ways in which a request meets the client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rabbet.server.errors import describe, from_exception

__all__ = ["DONE", "PING", "EventStream", "EventWriter", "event", "merge", "until_disconnect"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encoder = msgspec.json.Encoder()
_BREAKS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"]
"""Events end at a line feed alone, but many clients divide at all of str.splitlines; JSON escapes the others anyway."""
_T = TypeVar("_T")


def _encode(content: Any) -> bytes:
    """JSON on one line, for whatever a client takes for a line. Every event is made of this."""
    encoded = _encoder.encode(content)
    if not encoded.isascii():
        # These bytes stand for nothing else in UTF-8, and outside of strings JSON is ASCII.
        for raw, escaped in _BREAKS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def event(content: Any) -> bytes:
    """One event."""
    return b"data: " + _encode(content) + b"\n\n"


class EventWriter:
    """Writes the chunks of one answer; what is the same in all of them is encoded once."""

    def __init__(self, envelope: dict[str, Any]) -> None:
        self._head = b"data: " + _encode(envelope)[:-1] + b',"choices":'

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """One event; without ``usage`` it has no such key."""
        if usage is None:
            return self._head + _encode(choices) + b"}\n\n"
        return self._head + _encode(choices) + b',"usage":' + _encode(usage) + b"}\n\n"


class EventStream(Response):
    """A response that sends events as they come, a comment where nothing comes, and aborts when the client leaves.

    The status goes out with the first event, or with the first comment: what fails before that (a full queue, a request
    that the engine refuses) is an ordinary error response, and what fails later is an event with an error object.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, keep_alive_s: float) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._is_started = False
        self._is_ending = False
        self._has_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry: three tasks, and the end of the first two ends all."""
        scope.setdefault("state", {})["is_event_stream"] = True
        pump = asyncio.create_task(self._pump(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        ping = asyncio.create_task(self._ping(send))
        tasks = (pump, gone, ping)
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()
        if pump.done() and not pump.cancelled():
            # A connection that broke while we wrote is the server's to log; everything else became an event.
            pump.result()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for content in self._events:
                await self._write(send, content)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # this is the edge to the client
            if not self._is_started:
                self._is_ending = True
                await from_exception(error)(scope, receive, send)
                return
            await self._write(send, event(describe(error)[1]) + DONE)
        self._is_ending = True
        await self._start(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            self._has_sent = False
            await asyncio.sleep(self._keep_alive_s)
            if not (self._has_sent or self._is_ending):
                await self._write(send, PING)

    async def _write(self, send: Send, content: bytes) -> None:
        self._has_sent = True
        await self._start(send)
        await send({"type": "http.response.body", "body": content, "more_body": True})

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


async def merge(sources: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """Items of several generators as they come, each with the number of its source; the first error ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, _T] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, source: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    queue.put_nowait((number, item))
            queue.put_nowait(None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # handed to the one who reads
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    left = len(tasks)
    try:
        while left:
            news = await queue.get()
            if news is None:
                left -= 1
            elif isinstance(news, BaseException):
                raise news
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Awaitable[_T]) -> _T | None:
    """The result of ``work``, or None if the client went away first; the work is cancelled then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
