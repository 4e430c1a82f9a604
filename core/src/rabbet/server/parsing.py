"""Where model text becomes content, reasoning and tool calls: one seam for whole and streamed answers.

Which parsers there are is the operator's choice (``--tool-call-parser``, ``--reasoning-parser``); without one the text
is the content.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from rabbet.contracts.parsers import ParsedPiece, ReasoningParser, ToolCallPiece, ToolParser
from rabbet.errors import InvalidRequestError, PluginError
from rabbet.server.protocol import ChatCompletionRequest

__all__ = ["Message", "Parsers", "TextParser"]

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def _contained(call: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """At the edge of a plugin: what would end the process ends the request."""

    @functools.wraps(call)
    def contained(*args: _Given.args, **options: _Given.kwargs) -> _Made:
        try:
            return call(*args, **options)
        except Exception:
            raise
        except BaseException as error:
            raise PluginError(f"a parser raised {type(error).__name__}: {error}") from error

    return contained


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsers:
    """The parsers that this server uses.

    Attributes:
        tools: Class of the tool parser, or None.
        reasoning: Class of the reasoning parser, or None.
        is_auto_allowed: The model may decide to call tools.
    """

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    is_auto_allowed: bool = False

    def check(self, body: ChatCompletionRequest) -> None:
        """Refuse what this server cannot do with tools.

        Raises:
            InvalidRequestError: Naming the field, and the kind of plugin that is missing.
        """
        if body.tools is not None and not body.tools:
            raise InvalidRequestError("tools is empty; leave it out", field="tools", value=[])
        if body.tool_choice in (None, "none") and not body.tools:
            return
        if not body.tools:
            raise InvalidRequestError("tool_choice needs tools", field="tool_choice", value=body.tool_choice)
        if body.tool_choice == "none":
            return
        if body.tool_choice not in (None, "auto"):
            raise InvalidRequestError(
                "a tool_choice other than none and auto needs a grammar plugin, and none is in use; see: rabbet plugins "
                "list --kind grammar",
                field="tool_choice",
                value=body.tool_choice,
            )
        if self.tools is None or not self.is_auto_allowed:
            raise InvalidRequestError(
                "tools need a tool_parser plugin, and none is in use (--enable-auto-tool-choice --tool-call-parser NAME; "
                'see: rabbet plugins list --kind tool_parser); with tool_choice "none" the model sees the tools and '
                "does not call them",
                field="tools",
            )

    @_contained
    def make(self, body: ChatCompletionRequest, tokenizer: Any) -> TextParser:
        """A parser for one output."""
        has_tools = self.tools is not None and body.tools and body.tool_choice != "none"
        return TextParser(
            self.reasoning(tokenizer) if self.reasoning is not None else None,
            self.tools(tokenizer, body.tools or ()) if has_tools and self.tools is not None else None,
            most_calls=None if body.parallel_tool_calls else 1,
        )


class TextParser:
    """One output's text: reasoning is split off first, tool calls are looked for in what is left."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        most_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = most_calls
        self.has_calls = False

    @_contained
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedPiece:
        """New text in, new pieces out."""
        if self._reasoning is None and self._tools is None:
            return ParsedPiece(content=text)
        first = self._reasoning.feed(text, token_ids) if self._reasoning is not None else ParsedPiece(content=text)
        if self._tools is None or not first.content:
            return first
        ids = token_ids if first.content == text else ()
        return self._kept(_joined(ParsedPiece(reasoning=first.reasoning), self._tools.feed(first.content, ids)))

    @_contained
    def finish(self) -> ParsedPiece:
        """The text is over: what was held back."""
        first = self._reasoning.finish() if self._reasoning is not None else ParsedPiece()
        if self._tools is None:
            return first
        rest = self._tools.feed(first.content) if first.content else ParsedPiece()
        joined = _joined(ParsedPiece(reasoning=first.reasoning), rest)
        return self._kept(_joined(joined, self._tools.finish()))

    def _kept(self, piece: ParsedPiece) -> ParsedPiece:
        """The piece without calls beyond the allowed number."""
        calls = tuple(c for c in piece.tool_calls if self._most_calls is None or c.index < self._most_calls)
        self.has_calls = self.has_calls or bool(calls)
        if len(calls) == len(piece.tool_calls):
            return piece
        return ParsedPiece(content=piece.content, reasoning=piece.reasoning, tool_calls=calls)


def _joined(first: ParsedPiece, second: ParsedPiece) -> ParsedPiece:
    return ParsedPiece(
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
    )


class Message:
    """Turns pieces into OpenAI's objects: deltas of a stream, or one whole message."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def delta(self, piece: ParsedPiece) -> dict[str, Any]:
        """What a chunk says of a piece; empty if there is nothing to say."""
        found: dict[str, Any] = {}
        if piece.content:
            found["content"] = piece.content
        if piece.reasoning:
            # Clients of two generations look for it under two names.
            found["reasoning"] = found["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            found["tool_calls"] = [self._call_delta(call) for call in piece.tool_calls]
        return found

    def add(self, piece: ParsedPiece) -> None:
        """Take in a piece for ``whole``."""
        self._content.append(piece.content)
        self._thoughts.append(piece.reasoning)
        for call in piece.tool_calls:
            known = self._calls.setdefault(call.index, _new_call())
            known["function"]["name"] = call.name or known["function"]["name"]
            known["function"]["arguments"] += call.arguments

    def whole(self, prefix: str = "") -> dict[str, Any]:
        """The message of everything that was added; with tool calls, empty content is null."""
        content, reasoning = prefix + "".join(self._content), "".join(self._thoughts)
        message: dict[str, Any] = {"role": self._role, "content": content}
        if reasoning:
            message["reasoning"] = message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message

    def _call_delta(self, call: ToolCallPiece) -> dict[str, Any]:
        """Id, type and name go out once, with the first piece of a call."""
        if call.index in self._calls:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        new = self._calls[call.index] = _new_call()
        function = {"name": call.name or "", "arguments": call.arguments}
        return {"index": call.index, "id": new["id"], "type": "function", "function": function}


def _new_call() -> dict[str, Any]:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": "", "arguments": ""}}
