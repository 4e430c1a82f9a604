"""``rabbet chat`` and ``rabbet complete``: a terminal client that streams answers and shows their speed."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import httpx
import typer

from rabbet.errors import ConfigError, RabbetError

__all__ = ["Talk", "TalkError", "api_base", "first_model", "headers_of", "message_of"]

_TIMEOUT = httpx.Timeout(10.0, read=600.0)
_KEYS = "Ctrl+C stops an answer, Ctrl+D ends"
_HELP = f"""\
/clear         forget what was said, all but the system message
/help          list these commands
/exit, /quit   end
{_KEYS}"""


class TalkError(RabbetError):
    """The server cannot be reached, or refused."""


def api_base(url: str) -> str:
    """The URL that routes are appended to: it ends with ``/v1``."""
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def headers_of(api_key: str | None) -> dict[str, str]:
    """What a request carries of a key.

    Raises:
        ConfigError: If no header can hold it.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key goes into a header, so it holds printable ASCII characters only", field="api_key")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def first_model(client: httpx.Client, base: str) -> str:
    """The first name that the server serves.

    Raises:
        TalkError: If no server answers there, or it refuses, or it is something else.
    """
    try:
        answer = client.get(f"{base}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TalkError(f"no server answers at {base} ({error}); start one: rabbet serve MODEL") from error
    if answer.status_code != 200:
        hint = "; give its key with --api-key" if answer.status_code == 401 else ""
        raise TalkError(f"{base}/models answers {answer.status_code}: {message_of(answer.text)}{hint}")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise TalkError(f"{base}/models answers with something else than a list of models; check --url") from error


class Talk:
    """A connection to one server."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None, options: Mapping[str, Any]) -> None:
        """Connect; asks for the model's name if none is given."""
        self._base = api_base(url)
        self._client = httpx.Client(timeout=_TIMEOUT, headers=headers_of(api_key), trust_env=False)
        self._options = {key: value for key, value in options.items() if value is not None}
        self._model = model or first_model(self._client, self._base)

    def chat(self, *, quick: str | None, system: str | None) -> None:
        """A conversation, or one question. Ctrl+D or ``/exit`` ends it; ``/help`` lists the other commands."""
        kept = [{"role": "system", "content": system}] if system else []
        messages = list(kept)
        if quick is None and sys.stdin.isatty():
            _note(f"{self._model} at {self._base}; /help lists the commands; {_KEYS}")
        for line in self._lines(quick):
            word = line.strip()
            if quick is None and word in ("/exit", "/quit"):
                return
            if quick is None and word.startswith("/") and word[1:].isalpha():
                if word == "/clear":
                    messages = list(kept)
                _note(
                    {"/clear": "forgotten", "/help": _HELP}.get(word, f"there is no command {word}; /help lists them")
                )
                continue
            question = {"role": "user", "content": line}
            answer = self._try("chat/completions", {"messages": [*messages, question]}, _chat_text, quick)
            # A question without an answer leaves the conversation as it was.
            messages += [question, {"role": "assistant", "content": answer}] if answer else []

    def complete(self, *, quick: str | None) -> None:
        """Texts to go on with."""
        for line in self._lines(quick):
            self._try("completions", {"prompt": line}, _completion_text, quick)

    def _try(self, route: str, body: Mapping[str, Any], text_of: Any, quick: str | None) -> str | None:
        """One answer. What the server refuses ends a single question, but not a conversation."""
        try:
            return self._stream(route, body, text_of)
        except TalkError as error:
            if quick is not None:
                raise
            hint = "; /clear begins anew" if len(body.get("messages", ())) > 2 else ""
            print(f"error: {error}{hint}", file=sys.stderr)
            return None

    @staticmethod
    def _lines(quick: str | None) -> Iterator[str]:
        if quick is not None:
            yield quick
            return
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  ``input`` edits lines and remembers them with it
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                _note("Ctrl+D ends")
                continue
            if line.strip():
                yield line

    def _stream(self, route: str, body: Mapping[str, Any], text_of: Any) -> str:
        """Print an answer as it comes; returns it. Ctrl+C stops the answer, not the conversation."""
        request = {
            "model": self._model, "stream": True, "stream_options": {"include_usage": True}, **self._options, **body
        }  # fmt: skip
        started = time.monotonic()
        times: list[float] = []
        parts: list[str] = []
        usage: Mapping[str, Any] = {}
        reason: str | None = None
        try:
            with contextlib.closing(self._events(route, request)) as events:
                for event in events:
                    usage = event.get("usage") or usage
                    reason = next((choice.get("finish_reason") for choice in event["choices"]), None) or reason
                    if text := text_of(event):
                        times.append(time.monotonic())
                        parts.append(text)
                        print(text, end="", flush=True)
        except KeyboardInterrupt:
            reason = "stopped"
        print()
        self._show_speed(usage.get("completion_tokens", len(times)), started, times, reason)
        return "".join(parts)

    def _events(self, route: str, request: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        try:
            with self._client.stream("POST", f"{self._base}/{route}", json=request) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise TalkError(message_of(answer.text))
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise TalkError(message_of(line[6:]))
                    yield event
        except httpx.InvalidURL as error:
            raise TalkError(f"{self._base} is no URL ({error}); check --url") from error
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise TalkError(f"the connection to the server broke: {error}") from error

    @staticmethod
    def _show_speed(count: int, started: float, times: list[float], reason: str | None) -> None:
        """A line of tokens and speed; of a stopped answer the pieces that came are counted."""
        parts = [f"{count} token{'' if count == 1 else 's'}"]
        if times:
            parts.append(f"first after {times[0] - started:.2f} s")
            if count > 1 and (seconds := time.monotonic() - times[0]) > 0:
                parts.append(f"{(count - 1) / seconds:.1f} tokens/s")
        ends = {"length": "ended by the limit (--max-tokens, or the context)", "stopped": "stopped"}
        _note(f"[{', '.join([*parts, *filter(None, [ends.get(reason or '')])])}]")


def _note(text: str) -> None:
    """A dim line beside the conversation, where it disturbs no pipe."""
    typer.secho(text, err=True, dim=True)


def _chat_text(event: Mapping[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _completion_text(event: Mapping[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def message_of(text: str) -> str:
    """What an error body says."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:200]
