"""Server-sent events, and the two ways in which a request meets the client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse

from rabbet.server.errors import describe

__all__ = ["DONE", "event", "event_stream", "until_disconnect"]

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encoder = msgspec.json.Encoder()
_T = TypeVar("_T")


def event(content: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


def event_stream(chunks: AsyncGenerator[bytes, None], *, keep_alive_s: float) -> StreamingResponse:
    """A response that sends chunks as they come, a comment when nothing comes, and errors inside the stream.

    The response has begun when the first chunk is known, so errors of the request itself must be raised before.
    """
    return StreamingResponse(_guarded(chunks, keep_alive_s), media_type="text/event-stream", headers=_HEADERS)


async def _guarded(chunks: AsyncGenerator[bytes, None], keep_alive_s: float) -> AsyncIterator[bytes]:
    pending: asyncio.Task[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(chunks.__anext__())
            done, _ = await asyncio.wait({pending}, timeout=keep_alive_s)
            if not done:
                yield _PING
                continue
            finished, pending = pending, None
            yield finished.result()
    except StopAsyncIteration:
        return
    except Exception as error:  # the stream has begun, so the error goes into it
        yield event(describe(error)[1])
        yield DONE
    finally:
        if pending is not None:
            pending.cancel()
        await chunks.aclose()


async def until_disconnect(request: Request, work: Awaitable[_T]) -> _T | None:
    """The result of ``work``, or None if the client went away first; the work is cancelled then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
