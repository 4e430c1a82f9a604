"""Contracts of tool-call and reasoning parsers: text of the model in, structured pieces out, while it streams.

The rule that every parser is tested by: the pieces put together are the same however the text is cut into chunks.
Work is linear in the text; model text is never evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ParsedPiece", "ReasoningParser", "ToolCallPiece", "ToolParser"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallPiece:
    """A part of one call. ``name`` is set once, with the first piece of its index; ``arguments`` parts are joined."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedPiece:
    """What a stretch of text turned into."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = field(default_factory=tuple)


class ToolParser(ABC):
    """State of one response. A new object is made for each."""

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        self.tokenizer = tokenizer
        self.tools = tools

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedPiece:
        """Take in new text; text that could still become a call is held back."""

    @abstractmethod
    def finish(self) -> ParsedPiece:
        """The text is over: give out what was held back; an unfinished call comes out as content."""


class ReasoningParser(ABC):
    """State of one response. A new object is made for each."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedPiece:
        """Take in new text and split it into reasoning and content."""

    @abstractmethod
    def finish(self) -> ParsedPiece:
        """Give out what was held back."""

    @abstractmethod
    def is_reasoning_end(self, token_ids: Sequence[int]) -> bool:
        """Whether the reasoning has ended within these ids (grammars start there)."""
