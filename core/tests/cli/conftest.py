"""A command line that is run in this process, and a server that answers what a test wants."""

from __future__ import annotations

import contextlib
import json
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rabbet.cli.main import main

Result = tuple[int, str, str]


@pytest.fixture
def rabbet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``rabbet WORDS``; gives the status, the output and the errors."""
    monkeypatch.delenv("RABBET_LOG_LEVEL", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Result:
        status: Any = 0
        try:
            main(list(words))
        except SystemExit as error:
            status = error.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@dataclass
class FakeServer:
    """A server in OpenAI's shape.

    Attributes:
        url: Its address.
        requests: Path and body of each request.
        tokens: Text of each token of an answer.
        failure: Status and body of each answer, or None.
        stream_failure: An error event in the middle of each stream.
        keys: Keys that are accepted; any if empty.
        models: Body of ``/v1/models``.
        lost: Tokens that are left out although they were asked for.
        is_endless: After its first token a stream sends none, until its reader has gone.
        left: Set when the reader of an endless stream has gone.
    """

    url: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    tokens: tuple[str, ...] = ("Hel", "lo")
    failure: tuple[int, Any] | None = None
    stream_failure: str | None = None
    keys: tuple[str, ...] = ()
    models: Any = field(default_factory=lambda: {"data": [{"id": "tiny"}]})
    lost: int = 0
    is_endless: bool = False
    left: threading.Event = field(default_factory=threading.Event)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream."""
        is_chat = path.endswith("chat/completions")
        asked = body.get("max_tokens") or len(self.tokens)
        tokens = [self.tokens[number % len(self.tokens)] for number in range(asked - self.lost)]
        for number, text in enumerate(tokens):
            if number == 1 and self.stream_failure:
                yield {"error": {"message": self.stream_failure}}
                return
            yield {"choices": [{"delta": {"content": text}} if is_chat else {"text": text, "finish_reason": None}]}
        yield {
            "choices": [{"delta": {}, "finish_reason": "stop"} if is_chat else {"text": "", "finish_reason": "length"}]
        }
        prompt = body.get("prompt", "")
        yield {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A running one."""
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        """Answers for ``fake``."""

        def log_message(self, *arguments: Any) -> None:
            """Nothing is logged."""

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _json(self, status: int, body: Any) -> None:
            text = body if isinstance(body, str) else json.dumps(body)
            self._send(status, text.encode(), "application/json")

        def do_GET(self) -> None:
            """``/v1/models``."""
            fake.requests.append((self.path, None))
            if fake.keys and self.headers.get("Authorization") not in [f"Bearer {key}" for key in fake.keys]:
                self._json(401, {"error": "Unauthorized"})
            else:
                self._json(200, fake.models)

        def _wait_until_left(self) -> None:
            """Comments, which say nothing, until writing fails."""
            deadline = time.monotonic() + 30
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline:
                    self.wfile.write(b": still there\n\n")
                    self.wfile.flush()
                    if select.select([self.connection], [], [], 0.01)[0]:
                        break
            fake.left.set()

        def do_POST(self) -> None:
            """A stream."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append((self.path, body))
            if fake.failure is not None:
                self._json(*fake.failure)
                return
            if fake.is_endless:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"data: {json.dumps(next(fake.events(self.path, body)))}\n\n".encode())
                self._wait_until_left()
                return
            lines = [f"data: {json.dumps(event)}\n\n" for event in fake.events(self.path, body)]
            self._send(200, "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        fake.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        http.shutdown()
        thread.join()
