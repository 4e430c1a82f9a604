"""``rabbet chat`` and ``rabbet complete`` against a server."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
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
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd?\n"))
    status, out, _ = rabbet("chat", "--url", server.url)
    assert status == 0
    assert out == "> Hello\n> > Hello\n> \n", "an empty line asks nothing"
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


def say(rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch, *lines: str, system: str | None = None) -> Any:
    """A conversation of these lines; gives the messages of each request, and what was printed beside the answers."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status, _, error = rabbet("chat", "--url", server.url, *(("--system", system) if system else ()))
    assert status == 0
    bodies = [body for path, body in server.requests if path.endswith("/completions")]
    return [[message["content"] for message in body["messages"]] for body in bodies], error


@pytest.mark.parametrize("word", ["/exit", "/quit", " /exit "])
def test_a_word_ends_the_conversation(rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    assert say(rabbet, server, monkeypatch, "Hi", word, "never sent")[0] == [["Hi"]]


def test_clear_forgets_all_but_the_system_message(rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, error = say(rabbet, server, monkeypatch, "Hi", "/clear", "Anew", "More", system="Brief")
    assert sent == [["Brief", "Hi"], ["Brief", "Anew"], ["Brief", "Anew", "Hello", "More"]]
    assert "forgotten\n" in error


def test_help_lists_the_commands_and_an_unknown_one_is_told(
    rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, error = say(rabbet, server, monkeypatch, "/help", "/frob", "/etc/hosts is what?")
    assert sent == [["/etc/hosts is what?"]], "a path is no command"
    for part in ("/exit", "/quit", "/clear", "/help", "Ctrl+C", "Ctrl+D", "there is no command /frob"):
        assert part in error


def test_one_question_may_be_any_word(rabbet: Run, server: Any) -> None:
    assert rabbet("chat", "--url", server.url, "-q", "/help")[0] == 0
    assert server.requests[-1][1]["messages"][-1]["content"] == "/help"


def test_an_answer_that_the_limit_cut_says_so(rabbet: Run, server: Any) -> None:
    # The fake's completions end with the reason "length", its chats with "stop".
    assert "ended by the limit (--max-tokens, or the context)]" in rabbet("complete", "--url", server.url, "Hi")[2]
    assert "limit" not in rabbet("chat", "--url", server.url, "-q", "Hi")[2]


def test_an_answer_without_text_is_no_part_of_the_conversation(
    rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tokens = ("",)
    sent, error = say(rabbet, server, monkeypatch, "Hi", "Again")
    assert sent == [["Hi"], ["Again"]] and error == "[1 token]\n" * 2


def test_the_prompt_of_a_completion_is_an_argument_too(rabbet: Run, server: Any) -> None:
    status, out, _ = rabbet("complete", "--url", server.url, "One two", "--max-tokens", "2")
    assert (status, out, server.requests[-1][1]["prompt"]) == (0, "Hello\n", "One two")
    status, out, error = rabbet("complete", "One two", "-q", "Three")
    assert (status, out) == (2, "") and "PROMPT ('One two')" in error and "--quick ('Three')" in error


def read_until(terminal: int, what: str, limit_s: float = 20.0) -> str:
    """What a terminal shows until ``what`` is in it."""
    text, deadline = "", time.monotonic() + limit_s
    while what not in text:
        assert time.monotonic() < deadline, f"{what!r} is not in {text!r}"
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 4096).decode()
    return text


def test_in_a_terminal_ctrl_c_stops_the_answer_alone_and_ctrl_d_ends(server: Any) -> None:
    server.is_endless = True
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rabbet", "chat", "--url", server.url], stdin=inner, stdout=inner, stderr=inner,
        start_new_session=True, env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inner)
    try:
        assert "/help lists the commands" in read_until(terminal, "> ")
        os.write(terminal, b"Hi\n")
        read_until(terminal, "Hel")
        os.write(terminal, b"\x03")
        shown = read_until(terminal, "> ")
        assert re.search(r"\x1b\[2m\[1 token, first after [\d.]+ s, stopped\]\x1b\[0m", shown), shown
        assert server.left.wait(20), "the server was not told that nobody reads"
        os.write(terminal, b"\x03")
        assert "Ctrl+D ends" in read_until(terminal, "> ")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
