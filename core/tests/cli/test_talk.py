"""``rabbet chat`` and ``rabbet complete`` against a server."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]


def test_one_question_prints_the_answer_and_its_speed(rabbet: Run, server: Any) -> None:
    status, out, error = rabbet("chat", "--url", server.url, "-q", "Hi", "--system", "Be brief", "--temperature", "0")
    assert (status, out) == (0, "Hello\n")
    assert error.startswith("[2 tokens, first after ") and "tokens/s" in error
    path, body = server.requests[-1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert (body["model"], body["stream"], body["temperature"]) == ("tiny", True, 0)
    assert "max_tokens" not in body


def test_a_text_is_completed(rabbet: Run, server: Any) -> None:
    status, out, _ = rabbet(
        "complete", "--url", f"{server.url}/v1/", "--model", "other", "-q", "One", "--max-tokens", "3"
    )
    assert (status, out) == (0, "HelloHel\n")
    assert [path for path, _ in server.requests] == ["/v1/completions"]
    assert server.requests[-1][1]["prompt"] == "One" and server.requests[-1][1]["model"] == "other"


def test_a_conversation_keeps_what_was_said(rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nAnd?\n\nnever read\n"))
    status, out, _ = rabbet("chat", "--url", server.url)
    assert status == 0
    assert out == "> Hello\n> Hello\n> "
    roles = [message["role"] for message in server.requests[-1][1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_a_refused_question_leaves_the_conversation_as_it_was(
    rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.failure = (400, {"error": {"message": "the prompt is too long"}})
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nAgain\n"))
    status, _, error = rabbet("chat", "--url", server.url)
    assert status == 0
    assert error == "error: the prompt is too long\n" * 2
    assert [len(body["messages"]) for _, body in server.requests[1:]] == [1, 1]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            (400, {"error": {"message": "temperature is 9, but must be at most 2"}}),
            "temperature is 9, but must be at most 2",
        ),
        ((500, "<html>broken</html>"), "<html>broken</html>"),
        ((503, {"error": "overloaded"}), "overloaded"),
    ],
)
def test_what_the_server_refuses_is_said(rabbet: Run, server: Any, failure: Any, message: str) -> None:
    server.failure = failure
    assert rabbet("chat", "--url", server.url, "-q", "Hi") == (1, "", f"rabbet: error: {message}\n")


def test_an_error_within_the_stream_is_said_after_what_came(rabbet: Run, server: Any) -> None:
    server.stream_failure = "the engine died"
    status, out, error = rabbet("complete", "--url", server.url, "-q", "Hi")
    assert status == 1
    assert out.startswith("Hel") and "lo" not in out
    assert error == "rabbet: error: the engine died\n"


def test_a_key_is_sent_and_asked_for(rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.keys = ("k1",)
    status, _, error = rabbet("chat", "--url", server.url, "-q", "Hi")
    assert status == 1 and "answers 401: Unauthorized; give its key with --api-key" in error
    assert rabbet("chat", "--url", server.url, "-q", "Hi", "--api-key", "k1")[0] == 0
    monkeypatch.setenv("RABBET_API_KEY", "k1")
    assert rabbet("chat", "--url", server.url, "-q", "Hi")[0] == 0


@pytest.mark.parametrize("models", ["<html>", {"data": []}, {"models": 3}, [1]])
def test_something_that_is_no_such_server_is_told(rabbet: Run, server: Any, models: Any) -> None:
    server.models = models
    status, _, error = rabbet("chat", "--url", server.url, "-q", "Hi")
    assert status == 1 and "something else than a list of models; check --url" in error


def test_url_that_is_none_is_told_where_the_model_is_given_too(rabbet: Run) -> None:
    status, out, error = rabbet("complete", "--url", "http://127.0.0.1:port", "--model", "m", "-q", "Hi")
    assert (status, out) == (1, "")
    assert error.startswith("rabbet: error: http://127.0.0.1:port/v1 is no URL") and "--url" in error
