"""Streams without a server: comments while nothing comes, one end, nothing left running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from rabbet.errors import OverloadedError, RequestFailedError
from rabbet.server.stream import DONE, EventStream, EventWriter, event, merge, until_disconnect
from rabbet.types.outputs import FinishReason

BREAKS = "a\x85b\u2028c\u2029d é\u0085\U0001f600\v\f\x1c\x1d\x1e\r\n"
"""All at which str.splitlines divides, beside others that need two and four bytes."""


class Client:
    """The other end of a response."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.news = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    async def until(self, text: bytes) -> None:
        while text not in self.body:
            self.news.clear()
            await self.news.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def starts(self) -> list[int]:
        return [message["status"] for message in self.sent if message["type"] == "http.response.start"]

    async def get(self, events: AsyncGenerator[bytes, None], keep_alive_s: float = 60.0) -> None:
        await EventStream(events, keep_alive_s=keep_alive_s)({"type": "http"}, self.receive, self.send)


@pytest.fixture
def run() -> Callable[..., Any]:
    async def alone(work: Any) -> None:
        await work()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda work: asyncio.run(alone(work))


def test_events_then_the_end(run: Callable[..., Any]) -> None:
    async def work() -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            yield b"one"
            yield DONE

        client = Client()
        await client.get(events())
        assert client.starts == [200] and client.body == b"one" + DONE
        assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        assert (b"x-accel-buffering", b"no") in client.sent[0]["headers"]

    run(work)


def test_comments_come_while_nothing_else_does(run: Callable[..., Any]) -> None:
    async def work() -> None:
        client, gate = Client(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await gate.wait()
            yield b"late"

        task = asyncio.create_task(client.get(events(), keep_alive_s=0.001))
        await client.until(b": ping\n\n: ping\n\n")
        gate.set()
        await task
        assert client.body.endswith(b"late") and client.starts == [200]

    run(work)


@pytest.mark.parametrize("has_pinged", [False, True])
def test_a_refusal_before_anything_was_sent_has_its_own_status(run: Callable[..., Any], has_pinged: bool) -> None:
    async def work() -> None:
        client, gate = Client(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await gate.wait()
            raise OverloadedError("full")
            yield b""

        task = asyncio.create_task(client.get(events(), keep_alive_s=0.001 if has_pinged else 60))
        if has_pinged:
            await client.until(b": ping")
        gate.set()
        await task
        assert client.starts == [200 if has_pinged else 503] and client.body.count(b'"overloaded"') == 1
        assert client.body.endswith(DONE) == has_pinged

    run(work)


@pytest.mark.parametrize("where", ["before", "between", "sending"])
def test_a_client_that_leaves_ends_the_work_at_once(run: Callable[..., Any], where: str) -> None:
    async def work() -> None:
        client, closed = Client(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                if where != "before":
                    yield b"one"
                await asyncio.Event().wait()
            finally:
                closed.set()

        async def stuck(message: Any) -> None:
            client.sent.append(message)
            client.news.set()
            if where == "sending" and message["type"] == "http.response.body":
                await asyncio.Event().wait()

        response = EventStream(events(), keep_alive_s=60)
        task = asyncio.create_task(response({"type": "http"}, client.receive, stuck))
        if where == "before":
            await asyncio.sleep(0)
        else:
            await client.until(b"one")
        client.gone.set()
        await task
        assert closed.is_set()

    run(work)


def test_whole_answers_are_given_up_with_the_client(run: Callable[..., Any]) -> None:
    async def work() -> None:
        client, cancelled = Client(), asyncio.Event()

        async def endless() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return ""

        async def quick() -> str:
            return "answer"

        request: Any = client
        assert await until_disconnect(request, quick()) == "answer"
        task = asyncio.create_task(until_disconnect(request, endless()))
        await asyncio.sleep(0)
        client.gone.set()
        assert await task is None and cancelled.is_set()

    run(work)


def test_merging_keeps_order_within_a_source_and_closes_all(run: Callable[..., Any]) -> None:
    closed: list[int] = []

    async def source(number: int, count: int) -> AsyncGenerator[int, None]:
        try:
            for item in range(count):
                await asyncio.sleep(0)
                yield item
            if number == 2:
                raise ValueError("third")
            await asyncio.sleep(3600 if number == 3 else 0)
        finally:
            closed.append(number)

    async def work() -> None:
        got = [pair async for pair in merge([source(0, 3), source(1, 5)])]
        assert [item for number, item in got if number == 0] == [0, 1, 2]
        assert [item for number, item in got if number == 1] == [0, 1, 2, 3, 4]
        assert [pair async for pair in merge([source(0, 2)])] == [(0, 0), (0, 1)]
        with pytest.raises(ValueError, match="third"):
            async for _ in merge([source(2, 2), source(3, 1)]):
                pass
        assert sorted(closed) == [0, 0, 1, 2, 3]

    run(work)


def test_written_chunks_are_json() -> None:
    writer = EventWriter({"id": "x"})
    assert writer.chunk([{"text": '"\n'}]) == b'data: {"id":"x","choices":[{"text":"\\"\\n"}]}\n\n'
    assert writer.chunk([], {"total": 1}) == b'data: {"id":"x","choices":[],"usage":{"total":1}}\n\n'


def test_what_clients_take_for_a_line_break_is_escaped_in_events_to_the_byte() -> None:
    assert event({"a": "x\x85y\u2028z\u2029"}) == b'data: {"a":"x\\u0085y\\u2028z\\u2029"}\n\n'
    assert event({"\u2028": 1}) == b'data: {"\\u2028":1}\n\n'
    # Nothing else changes: neighbours that share bytes with the three, and what was written as an escape already.
    kept = "\x84\x86 é\u0105\u2027\u202a \U00020a8a \\u2028"
    assert (
        event({"a": kept}) == f"data: {json.dumps({'a': kept}, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
    )
    writer = EventWriter({"model": "m\u2028"})
    assert writer.chunk([{"text": "\x85"}], {"n": "\u2029"}) == (
        b'data: {"model":"m\\u2028","choices":[{"text":"\\u0085"}],"usage":{"n":"\\u2029"}}\n\n'
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_clients_that_divide_at_any_line_break_read_every_event(site: Any, path: str) -> None:
    """Text of the model, an echo of the client's, log probabilities and an error within the stream."""
    ids = list(BREAKS.encode())
    failure = {"finish_reason": FinishReason.ERROR, "error": f"failed {BREAKS}"}
    site.engine.script = lambda _request: [*ids, 97, failure]
    is_chat = "chat" in path
    asked = {"messages": [{"role": "user", "content": BREAKS}], "logprobs": True} if is_chat else {"prompt": BREAKS}
    answer = site.post(path, {**asked, "echo": True, "stream": True, "max_tokens": 90})
    # httpx itself divides in this way.
    lines = [line for line in answer.iter_lines() if line]
    assert lines == [line for line in answer.text.split("\n") if line] and lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert BREAKS in events.pop()["error"]["message"]
    choices = [choice for chunk in events for choice in chunk["choices"]]
    assert "".join(c["delta"].get("content", "") if is_chat else c["text"] for c in choices) == BREAKS + BREAKS + "a"


def test_an_error_that_the_stream_itself_writes_is_escaped_too(run: Callable[..., Any]) -> None:
    async def work() -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            yield event({})
            raise RequestFailedError("x\u2028y")

        client = Client()
        await client.get(events())
        assert b'"message":"x\\u2028y"' in client.body and len(client.body.decode().splitlines()) == 6

    run(work)
