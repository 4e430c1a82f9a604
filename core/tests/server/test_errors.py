"""Every error in OpenAI's shape, with the right status, and with nothing of our inside in it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from server_scripted import parse_events

from rabbet.contracts.parsers import ParsedPiece
from rabbet.errors import EngineDeadError, OverloadedError
from rabbet.server.errors import ShuttingDownError, describe, error_body
from rabbet.server.parsing import Parsers
from rabbet.types.outputs import FinishReason

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
INTERNAL = re.compile(r'0x[0-9a-f]{6}|File "|/home/|/usr/|/root/|Traceback')
BODIES = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}
JSON = {"content-type": "application/json"}

failure = {"finish_reason": FinishReason.ERROR, "error": "kernel failed at 0xdeadbeef in /usr/lib/x.py"}
full = {"finish_reason": FinishReason.ERROR, "error": "the queue is full", "error_kind": "OverloadedError"}
refused = {"finish_reason": FinishReason.ERROR, "error": "no", "error_kind": "InvalidRequestError"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("step", "status", "code"), [(failure, 500, "request_failed"), (full, 503, "overloaded"), (refused, 400, 400)]
)
def test_failures_before_the_first_token_have_their_status(
    site: Any, path: str, stream: bool, step: dict[str, Any], status: int, code: Any
) -> None:
    """Also of a stream, whose status is not sent before there is something to send."""
    site.engine.script = lambda _request: [step]
    answer = site.post(path, {**BODIES[path], "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert not INTERNAL.search(answer.text)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert site.llm.num_open_requests == site.state.running == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_failures_in_a_stream_are_events_in_it(site: Any, path: str) -> None:
    site.engine.script = lambda _request: [97, 98, failure]
    answer = site.post(path, {**BODIES[path], "stream": True})
    chunks = parse_events(answer.text)
    assert answer.status_code == 200 and "choices" in chunks[0]
    assert chunks[-1]["error"]["type"] == "server_error" and not INTERNAL.search(answer.text)
    assert sum("error" in chunk for chunk in chunks) == 1
    assert site.state.stats.finished["error"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_failure_of_one_prompt_ends_the_call_and_frees_the_others(site: Any, stream: bool) -> None:
    never = asyncio.Event()
    site.engine.script = lambda request: [97, never] if request.prompt_token_ids[-1] == 120 else [failure]
    answer = site.post(COMPLETIONS, {"prompt": ["x", "y", "x"], "stream": stream})
    error = (parse_events(answer.text)[-1] if answer.status_code == 200 else answer.json())["error"]
    assert error["code"] == "request_failed"
    assert len(site.engine.aborted) == 2 and site.engine.num_playing == site.state.running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("death", "code"),
    [(EngineDeadError("killed by signal 9 at 0xabcdef12"), "engine_dead"), (ShuttingDownError("x"), "shutting_down")],
)
def test_open_requests_end_when_the_engine_does(site: Any, stream: bool, death: EngineDeadError, code: str) -> None:
    site.engine.script = lambda _request: [97, asyncio.Event()]

    async def work() -> Any:
        asked = asyncio.create_task(site.http.post(CHAT, json={**BODIES[CHAT], "stream": stream}))
        while not site.state.running or not site.engine.requests:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        site.llm.on_death(death)
        return await asked

    answer = site.run(work())
    error = (parse_events(answer.text)[-1] if answer.status_code == 200 else answer.json())["error"]
    assert (error["code"], error["type"]) == (code, "service_unavailable_error")
    assert answer.status_code == (200 if stream else 503) and not INTERNAL.search(answer.text)


class Panic(BaseException):
    """What a panic in a library of compiled code looks like: no Exception."""


@pytest.mark.parametrize("more", [{}, {"prompt": ["x", "y"]}])
@pytest.mark.parametrize("kind", [RuntimeError, Panic])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_our_own_mistakes_show_an_id_and_nothing_else(
    site: Any, path: str, stream: bool, kind: type, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: Any, **_more: Any) -> Any:
        raise kind("secret prompt of another user in /home/x at 0x7f00deadbeef")

    site.llm.generate = broken
    answer = site.post(path, {**BODIES[path], **more, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "server_error")
    assert "secret" not in answer.text and not INTERNAL.search(answer.text)
    error_id = error["message"].rpartition(" ")[2]
    assert any(error_id in record.getMessage() and record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [("GET", "/nowhere", 404, "not_found_error"), ("GET", CHAT, 405, "invalid_request_error"), ("DELETE", "/health", 405, "invalid_request_error"),
     ("GET", "/v1/models/none", 404, "not_found_error")],
)  # fmt: skip
def test_wrong_routes_and_methods_are_json_too(site: Any, method: str, path: str, status: int, kind: str) -> None:
    answer = site.ask(method, path)
    assert answer.status_code == status and answer.headers["content-type"] == "application/json"
    assert (
        set(answer.json()["error"]) == {"message", "type", "param", "code"} and answer.json()["error"]["type"] == kind
    )
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_unknown_models_are_named(site: Any, path: str) -> None:
    more = {"tokens": [1]} if path == "/detokenize" else BODIES.get(path, {"prompt": "x"})
    answer = site.post(path, {**more, "model": "gpt-9"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "gpt-9" in error["message"] and "scripted" in error["message"]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400), (b"", JSON, 400), (b"[1]", JSON, 400), (b"null", JSON, 400), (b"\xff\xfe{}", JSON, 400), (b"\xef\xbb\xbf{}", JSON, 400),
        (b'{"prompt": "x", "temperature": NaN}', JSON, 400), (b'{"prompt": "x", "temperature": Infinity}', JSON, 400), (b'{"prompt": "\\ud800"}', JSON, 400),
        (b'{"prompt": "\xed\xa0\x80"}', JSON, 400), (b'{"a":' * 100_000, JSON, 400), (b'{"prompt": "x", "a": ' + b"[" * 200 + b"]" * 200 + b"}", JSON, 400),
        (b'{"prompt": "x", "a": ' + b"[" * 100 + b"]" * 100 + b"}", JSON, 200), (b'{"prompt": "x", "a": [' + b"[]," * 5000 + b"[]]}", JSON, 200),
        (b'{"prompt": "x", "temperature": 1e999}', JSON, 400), (b'{"prompt": "x", "prompt": "y"}', JSON, 200),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415), (b'{"prompt": "x"}', {}, 415), (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b'{"prompt": "x"}', {"content-type": "application/json; charset=utf-8"}, 200), (b'{"prompt": "x"}', {"content-type": "APPLICATION/JSON"}, 200),
        (b"\x1f\x8b\x08", {**JSON, "content-encoding": "gzip"}, 415),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bodies_are_json_or_refused(site: Any, content: bytes, headers: dict[str, str], status: int) -> None:
    answer = site.ask("POST", COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert status == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "value", ["2", 1.5, True, [], {}, 2**63, -(2**63), 1e300, "x" * 10_000], ids=lambda value: str(value)[:20]
)
@pytest.mark.parametrize(
    "name", ["n", "max_tokens", "seed", "top_k", "min_tokens", "priority", "stream_interval", "truncate_prompt_tokens"]
)
def test_numbers_are_numbers(site: Any, name: str, value: Any) -> None:
    answer = site.post(COMPLETIONS, {"prompt": "x", name: value})
    assert answer.status_code in (200, 400) and len(answer.text) < 4000
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == name
    else:
        assert isinstance(value, int) and not isinstance(value, bool)


def test_validation_names_the_field_and_cuts_the_value(site: Any) -> None:
    error = site.error(CHAT, {"messages": "y" * 100_000})
    assert error["param"] == "messages" and len(error["message"]) < 200
    nested = site.error(CHAT, {**BODIES[CHAT], "stream": True, "stream_options": {"include_usage": "maybe"}})
    assert nested["param"] == "stream_options" and "stream_options.include_usage" in nested["message"]


def test_texts_of_errors_keep_what_clients_sent_and_lose_what_is_ours() -> None:
    kept = error_body("the model '/models/mine' is not served", status=404)
    assert "/models/mine" in kept["error"]["message"]
    lost = error_body('File "/usr/lib/a.py", object at 0x7fabcdef, /srv/models/x', status=500)
    assert not re.search(r"/usr|/srv|0x7f", lost["error"]["message"])
    group = ExceptionGroup("x", [ExceptionGroup("y", [OverloadedError("full", retry_after_s=3)])])
    assert describe(group)[0] == 503 and describe(group)[2] == {"Retry-After": "3"}


def test_a_client_that_leaves_in_its_body_is_no_error_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from starlette.requests import ClientDisconnect

    status, body, _ = describe(ClientDisconnect())
    assert status == 400 and "client left" in body["error"]["message"]
    assert caplog.records == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["__init__", "feed", "finish"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_parser_cannot_end_the_server(
    site: Any, where: str, stream: bool, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Rude:
        def __init__(self, tokenizer: Any) -> None:
            self._maybe("__init__")

        def _maybe(self, now: str) -> None:
            if now == where:
                raise kind("enough")

        def feed(self, text: str, token_ids: Any = ()) -> ParsedPiece:
            self._maybe("feed")
            return ParsedPiece(content=text)

        def finish(self) -> ParsedPiece:
            self._maybe("finish")
            return ParsedPiece()

    site.state.parsers = Parsers(reasoning=Rude)  # type: ignore[arg-type]
    answer = site.post(CHAT, {**BODIES[CHAT], "max_tokens": 2, "stream": stream})
    error = (parse_events(answer.text)[-1] if answer.status_code == 200 else answer.json())["error"]
    assert error["type"] == "server_error" and "enough" not in answer.text
    assert kind.__name__ in caplog.text and "_maybe" in caplog.text
    assert site.get("/health").status_code == 200 and site.state.running == 0
