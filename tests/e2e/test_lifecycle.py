"""How servers end: by signals, by the death of a process, with and without requests under way. Real processes."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rabbet.worker.directory import SocketDirectory

# Enough steps that a stream of the tiny model outlives a signal by seconds.
LONG = 1500
NEVER_ENDS = 30_000
EXIT_ENGINE_DEAD = 3
Wait = Callable[..., None]


@pytest.fixture
def serve_tiny(serve: Callable[..., Any], tiny_model: Path) -> Callable[..., Any]:
    """Starts servers of the tiny model; they are ready when they are given."""

    def run(*options: str, **more: Any) -> Any:
        server = serve("--kv-cache-memory-bytes", "64M", *options, model=str(tiny_model), **more)
        assert server.process.poll() is None, server.log.read_text()
        return server

    return run


def health(server: Any) -> tuple[int, str | None]:
    """Status and error code; (0, None) if nobody listens."""
    try:
        answer = httpx.get(f"{server.url}/health", timeout=5)
    except httpx.HTTPError:
        return 0, None
    return answer.status_code, answer.json().get("error", {}).get("code")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_drain_lets_a_stream_end_and_refuses_new_requests(serve_tiny: Callable[..., Any], wait_until: Wait) -> None:
    server = serve_tiny("--shutdown-timeout", "60")
    engine = server.engine_pid()
    with server.stream(max_tokens=LONG, stream_options={"include_usage": True}) as events:
        first = next(events)
        assert first["choices"][0]["finish_reason"] is None
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: health(server) == (503, "draining"), "/health says that the server drains")
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=5)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "shutting down" in refused.json()["error"]["message"]
        rest = list(events)
    assert rest[-2]["choices"][0]["finish_reason"] == "length"
    assert rest[-1]["usage"]["completion_tokens"] == LONG
    assert server.process.wait(timeout=20) == 0
    assert not is_alive(engine)


def test_without_a_drain_a_signal_cuts_streams_with_an_error(serve_tiny: Callable[..., Any]) -> None:
    server = serve_tiny()
    engine = server.engine_pid()
    with server.stream(max_tokens=NEVER_ENDS) as events:
        next(events)
        server.process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        last = list(events)[-1]
    assert last["error"]["code"] == "shutting_down" and "shutting down" in last["error"]["message"], last
    assert server.process.wait(timeout=20) == 0
    assert time.monotonic() - signalled < 10
    assert not is_alive(engine)
    assert "Traceback" not in server.log.read_text()


def test_a_second_signal_ends_a_drain_at_once(serve_tiny: Callable[..., Any], wait_until: Wait) -> None:
    server = serve_tiny("--shutdown-timeout", "3600")
    engine = server.engine_pid()
    with server.stream(max_tokens=NEVER_ENDS) as events:
        next(events)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: health(server) == (503, "draining"), "/health says that the server drains")
        assert next(events)["choices"], "the stream goes on during the drain"
        server.process.send_signal(signal.SIGINT)
        signalled = time.monotonic()
        last: dict[str, Any] = {}
        try:
            for event in events:
                last = event
        except httpx.HTTPError:
            # The connection may be cut before the error event is out; it is not left open.
            last = {"error": {"code": "shutting_down"}}
    assert last.get("error", {}).get("code") == "shutting_down", last
    assert server.process.wait(timeout=20) == 0
    assert time.monotonic() - signalled < 10
    assert not is_alive(engine)


def test_a_stopped_engine_is_reported_and_recovers_and_a_killed_one_ends_the_server(
    serve_tiny: Callable[..., Any], wait_until: Wait
) -> None:
    # The log's level does not matter here; a long drain must not hold up the end of a server without an engine.
    server = serve_tiny("--shutdown-timeout", "3600")
    engine = server.engine_pid()
    with server.stream(max_tokens=LONG) as events:
        next(events)
        os.kill(engine, signal.SIGSTOP)
        try:
            # Heartbeats stop; after HEARTBEAT_LIMIT_S (5 s) of silence probes say so, and the port still answers.
            assert health(server)[0] == 200
            wait_until(lambda: health(server) == (503, "engine_dead"), "/health reports an engine that is stopped", 15)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: health(server)[0] == 200, "/health is well again")

    with server.stream(max_tokens=NEVER_ENDS) as events:
        next(events)
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        last = list(events)[-1]
        assert last["error"]["code"] == "engine_dead", last
        assert health(server) in ((503, "engine_dead"), (0, None))
    assert server.process.wait(timeout=20) == EXIT_ENGINE_DEAD
    assert time.monotonic() - killed < 10
    log = server.log.read_text()
    assert "signal 9" in log.splitlines()[-1] and "Traceback" not in log


def test_two_ranks_say_what_one_says_and_leave_no_process_when_the_server_is_killed(
    server: Any, serve: Callable[..., Any], wait_until: Wait
) -> None:
    options = ("--max-model-len", "512", "--dtype", "float32", "--kv-cache-memory-bytes", "64M")
    pair = serve(*options, "--tensor-parallel-size", "2")
    assert pair.process.poll() is None, pair.log.read_text()
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 24}
    one, two = (httpx.post(f"{item.url}/v1/completions", json=body, timeout=60).json() for item in (server, pair))
    assert two["choices"] == one["choices"] and one["usage"]["completion_tokens"] == 24
    family = [pair.engine_pid(), *pair.worker_pids()]
    assert len(family) == 3
    with pair.stream(max_tokens=400) as events:
        next(events)
        pair.process.kill()
        pair.process.wait()
    wait_until(lambda: not any(map(is_alive, family)), "engine and workers are gone", 15)


def test_no_rank_outlives_a_killed_engine_and_the_next_start_sweeps_what_it_left(
    serve_tiny: Callable[..., Any], wait_until: Wait, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    scratch = tmp_path_factory.mktemp("t")
    server = serve_tiny("--tensor-parallel-size", "2", environment={"TMPDIR": str(scratch)})
    engine, ranks = server.engine_pid(), server.worker_pids()
    assert len(ranks) == 2
    with server.stream(max_tokens=NEVER_ENDS) as events:
        next(events)
        # A stopped process runs no thread that could watch its parent.
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, ranks)), "the ranks are gone", 10)
    assert server.process.wait(timeout=20) == EXIT_ENGINE_DEAD
    left = list(scratch.iterdir())
    assert left, "nobody was there to remove it"
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    directory = SocketDirectory()
    assert list(scratch.iterdir()) == [directory.path]
    directory.close()
