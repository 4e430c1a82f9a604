"""A real socket: clients that leave, send slowly, or send too much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import pytest
import uvicorn

from rabbet.config.schema import ServerConfig
from rabbet.server.connection import Connection
from rabbet.server.listen import reach_of

PATH = "/v1/completions"
Work = Callable[[str, int], Coroutine[Any, Any, None]]


class Impatient(Connection):
    head_limit_s = 0.05


@pytest.fixture
def serve(site: Any) -> Callable[..., None]:
    """Runs a coroutine function against the site on a socket."""

    def run(work: Work, protocol: type[Connection] = Connection) -> None:
        async def main() -> None:
            config = uvicorn.Config(
                site.app, host="127.0.0.1", port=0, lifespan="off", log_config=None, http=protocol, ws="none",
                h11_max_incomplete_event_size=64 << 10, timeout_graceful_shutdown=1,
            )  # fmt: skip
            server = uvicorn.Server(config)
            server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.001)
            try:
                await work("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
            finally:
                server.should_exit = True
                await task

        site.run(main())

    return run


def request(body: Any, *, path: str = PATH, headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["close", "reset", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(
    site: Any, serve: Callable[..., None], stream: bool, how: str
) -> None:
    site.engine.script = lambda _request: [97, asyncio.Event()]

    async def work(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        sent = request({"prompt": ["x", "y"], "n": 2, "max_tokens": 5, "stream": stream})
        writer.write(sent.replace(b"HTTP/1.1", b"HTTP/1.0") if how == "1.0" else sent)
        await until(lambda: len(site.engine.requests) == 4)
        if stream:
            await reader.readuntil(b"data: ")
        if how == "reset":
            writer.transport.abort()
        elif how == "1.0":
            # Such a client cannot be asked whether it is still there.
            writer.write_eof()
        else:
            writer.close()
        await until(lambda: len(site.engine.aborted) == 4)
        await until(lambda: site.state.running == 0)
        assert site.llm.num_open_requests == site.engine.num_playing == 0
        assert site.state.stats.finished["abort"] == 2
        writer.close()

    serve(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_answer(site: Any, serve: Callable[..., None], stream: bool) -> None:
    """It may be a script that sends what it has and then reads; that it is still there is found out by writing."""
    gate = asyncio.Event()
    site.engine.script = lambda _request: [97, gate, 98]

    async def work(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        body = {"prompt": "x", "max_tokens": 2, "stream": stream}
        writer.write(request(body) + request(body))
        writer.write_eof()
        await until(lambda: site.engine.requests)
        await reader.readuntil(b": ping\n\n" if stream else b" 102 Processing\r\n\r\n")
        gate.set()
        async with asyncio.timeout(30):
            answers = await reader.read()
        assert answers.count(b"[DONE]" if stream else b'"text":"ab"') == 2, "also what was sent ahead is answered"
        assert site.state.stats.finished["length"] == 2 and site.engine.aborted == []
        writer.close()

    serve(work)


def test_a_client_that_ends_its_side_in_the_middle_of_a_body_is_gone(site: Any, serve: Callable[..., None]) -> None:
    async def work(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request({"prompt": "x"})[:-3])
        writer.write_eof()
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        assert site.engine.requests == []
        writer.close()

    serve(work)


def test_one_that_leaves_disturbs_no_other(site: Any, serve: Callable[..., None]) -> None:
    gate = asyncio.Event()
    site.engine.script = lambda request: (
        [97, gate, 98] if request.prompt_token_ids[-1] == 120 else [97, asyncio.Event()]
    )

    async def work(host: str, port: int) -> None:
        stays = await asyncio.open_connection(host, port)
        leaves = await asyncio.open_connection(host, port)
        identifier = "X-Request-Id: a\r\n"
        stays[1].write(request({"prompt": "x", "max_tokens": 2, "stream": True}, headers=identifier))
        leaves[1].write(request({"prompt": "y", "max_tokens": 2, "stream": True}, headers=identifier))
        await until(lambda: len(site.engine.requests) == 2)
        leaves[1].transport.abort()
        await until(lambda: site.engine.aborted)
        gate.set()
        text = await stays[0].readuntil(b"[DONE]")
        assert b'"text":"a"' in text and b'"text":"b"' in text and len(site.engine.aborted) == 1
        stays[1].close()

    serve(work)


def test_a_head_that_does_not_come_is_a_timeout(serve: Callable[..., None]) -> None:
    async def work(host: str, port: int) -> None:
        for start in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            for is_second in (False, True):
                reader, writer = await asyncio.open_connection(host, port)
                if is_second:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    await reader.readuntil(b"}")
                    start = start or b"G"
                writer.write(start)
                async with asyncio.timeout(30):
                    assert (await reader.read()).startswith(b"HTTP/1.1 408")
                writer.close()

    serve(work, Impatient)


def test_slow_answers_and_idle_connections_are_no_slow_heads(site: Any, serve: Callable[..., None]) -> None:
    gate = asyncio.Event()
    site.engine.script = lambda _request: [gate, 97]

    async def work(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(2):
            writer.write(request({"prompt": "x", "max_tokens": 1}))
            await asyncio.sleep(2 * Impatient.head_limit_s)
            gate.set()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}}")
            await asyncio.sleep(2 * Impatient.head_limit_s)
        writer.close()

    serve(work, Impatient)


def test_a_huge_head_is_refused(serve: Callable[..., None]) -> None:
    async def work(host: str, port: int) -> None:
        many = b"\r\n".join(b"X-%d: a" % i for i in range(20_000))
        for target, extra in (
            (b"/health", b"X-A: " + b"a" * (1 << 20)), (b"/health", many), (b"/health", b"X-A: " + b"a" * (65 << 10)),
            (b"/health", b"\r\n".join(b"X-%d: %s" % (i, b"a" * 1000) for i in range(66))), (b"/health?" + b"a" * (65 << 10), b"X-A: a"),
        ):  # fmt: skip
            reader, writer = await asyncio.open_connection(host, port)
            # In one piece, so that it is complete before anybody could call it too long.
            writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + extra + b"\r\n\r\n")
            async with asyncio.timeout(30):
                try:
                    status = await reader.readline()
                except ConnectionResetError:
                    status = b"HTTP/1.1 4"
            assert status.startswith(b"HTTP/1.1 4")
            writer.close()

    serve(work)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NO_HTTP = {
    "bytes": b"\x00\x01\x02\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200 + b"\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a negative length": POST + b"Content-Length: -5\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "a chunk without a size": POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_answered_like_all_errors(serve: Callable[..., None], name: str) -> None:
    async def work(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(NO_HTTP[name])
        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head and b"Connection: close" in head
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error" and "HTTP" in error["message"]
        writer.close()

    serve(work)


def test_an_offer_to_speak_something_else_is_not_taken_up(
    serve: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(host: str, port: int) -> None:
        for other in ("websocket", "h2c"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: {other}\r\nConnection: Upgrade\r\n\r\n".encode())
            async with asyncio.timeout(30):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()

    serve(work)
    assert not [record for record in caplog.records if "pgrade" in record.getMessage() or "pip" in record.getMessage()]


def test_a_length_that_is_too_much_is_refused_unread(serve: Callable[..., None]) -> None:
    async def work(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        assert b"connection: close" in (await reader.read()).lower()
        writer.close()

    serve(work)


def test_absolute_targets_are_served_by_their_path(serve: Callable[..., None]) -> None:
    async def work(host: str, port: int) -> None:
        for target, status in (
            (b"http://x/v1/models?a=1", 200),
            (b"HTTPS://u:p@x:1//health/", 200),
            (b"http://x/no", 404),
            (b"http://x", 404),
        ):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 %d" % status), target
            writer.close()

    serve(work)


@pytest.mark.parametrize(
    "framing",
    ["Content-Length: 5\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nContent-Length: 0",
     "Content-Length: 5\r\nContent-Length: 6", "Content-Length: +5", "Content-Length: 5, 6", "Transfer-Encoding: gzip, chunked",
     "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"],
)  # fmt: skip
def test_a_body_whose_length_is_told_twice_is_refused(site: Any, serve: Callable[..., None], framing: str) -> None:
    """What a proxy takes for the body and what we take for it must not differ: the rest would be somebody's request."""

    async def work(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        writer.write(head.encode() + b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(30):
            answer = await reader.read()
        assert (
            answer.startswith(b"HTTP/1.1 400")
            and answer.count(b"HTTP/1.1") == 1
            and b"connection: close" in answer.lower()
        )
        assert site.state.stats.responses.get(("/v1/models", 200)) is None
        writer.close()

    serve(work)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, " (and at every address of this machine, without a key)"),
        ({"host": "::", "api_key": ["k"]}, " (and at every address of this machine, with a key)"),
        ({"host": "127.0.0.1"}, ""),
        ({"uds": "/tmp/x.sock"}, ""),
    ],
)
def test_a_server_that_is_open_to_the_network_says_so(options: dict[str, Any], said: str) -> None:
    assert reach_of(ServerConfig(**options)) == said
