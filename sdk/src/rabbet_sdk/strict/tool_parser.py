"""A tool parser: each call is a JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rabbet.contracts import register_tool_parser
from rabbet.contracts.parsers import ParsedPiece, ToolCallPiece, ToolParser
from rabbet_sdk.strict import seal

__all__ = ["StrictToolParser"]

_START, _END = "<tool_call>", "</tool_call>"


@register_tool_parser("strict")
@seal
class StrictToolParser(ToolParser):
    """Gives each call out whole, when its end mark has come. Text that is no call stays content."""

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tokenizer, tools)
        self.parts: list[str] = []  # of the open call; a list, since a string would be copied with each chunk
        self.tail = ""  # may be the beginning of the mark that is waited for
        self.is_open = False
        self.count = 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedPiece:
        """Content up to the next start mark, and the calls whose end mark has come."""
        content: list[str] = []
        calls: list[ToolCallPiece] = []
        rest = self.tail + text
        while True:
            mark = _END if self.is_open else _START
            before, found, after = rest.partition(mark)
            keep = 0 if found else max(n for n in range(len(mark)) if before.endswith(mark[:n]))
            self.tail = before[len(before) - keep :]
            (self.parts if self.is_open else content).append(before[: len(before) - keep])
            if not found:
                return ParsedPiece(content="".join(content), tool_calls=tuple(calls))
            if self.is_open:
                body, self.parts = "".join(self.parts), []
                call = self.read(body)
                calls += [call] if call else []
                content += [] if call else [_START, body, _END]
            self.is_open, rest = not self.is_open, after

    def read(self, body: str) -> ToolCallPiece | None:
        """The call in ``body``; None if it is none. Text is read as JSON, never evaluated."""
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        self.count += 1
        return ToolCallPiece(index=self.count - 1, name=call["name"], arguments=json.dumps(call.get("arguments", {})))

    def finish(self) -> ParsedPiece:
        """An open call comes out as it was written."""
        text = (_START if self.is_open else "") + "".join(self.parts) + self.tail
        self.parts, self.tail, self.is_open = [], "", False
        return ParsedPiece(content=text)
