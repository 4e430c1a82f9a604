"""Suite of reasoning parsers."""

from __future__ import annotations

from typing import Any, ClassVar

from rabbet_sdk.conformance._parsing import Parsed, assert_linear, check_chunkings, parse
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.tokenizer import PieceTokenizer

__all__ = ["ReasoningParserConformance"]


class ReasoningParserConformance(PluginConformance):
    """Subclass it and set ``plugin``; for other marks than <think> and </think> also these.

    Attributes:
        start: Mark before the reasoning.
        end: Mark behind it.
    """

    kind = "reasoning_parser"
    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    knobs = PluginConformance.knobs | {"start", "end"}

    def _make(self, subject: Subject) -> Any:
        letters = sorted(set(self.start + self.end + "abc "))
        return subject.plugin_class(PieceTokenizer([*letters, self.start, self.end]))

    def test_any_chunking_equals_the_whole(self, subject: Subject) -> None:
        """However the text is cut, and nothing of it is lost."""
        marks = (self.start, self.end)

        def check(text: str, parsed: Parsed) -> None:
            left = text
            for mark in marks:
                left = left.replace(mark, "")
            got = parsed.reasoning + parsed.content
            for mark in marks:
                got = got.replace(mark, "")
            assert got == left, f"{text!r}: {left!r} became {got!r}"

        fragments = (*marks, self.start[:-1], self.end[:3], "<", "a", "é\n", " b c ", "</")
        check_chunkings(lambda: self._make(subject), fragments, check)

    def test_splits_reasoning_from_content(self, subject: Subject) -> None:
        """With both marks, and with the second one missing."""
        both = parse(self._make(subject), [f"{self.start}why{self.end}what"])
        assert (both.reasoning, both.content) == ("why", "what")
        cut = parse(self._make(subject), [f"{self.start}why{self.end[:-1]}"])
        assert (cut.reasoning, cut.content) == (f"why{self.end[:-1]}", "")

    def test_reasoning_end_is_seen_in_tokens(self, subject: Subject) -> None:
        """With the end mark among the ids, and not before."""
        parser = self._make(subject)
        encode = parser.tokenizer.encode
        assert not parser.is_reasoning_end(encode(f"{self.start}a b"))
        assert parser.is_reasoning_end(encode(f"{self.start}a{self.end}"))
        assert parser.is_reasoning_end(encode(f"{self.start}a{self.end}b c"))

    @level(3)
    def test_responses_share_no_state(self, subject: Subject) -> None:
        """Two responses side by side."""
        first, second = self._make(subject), self._make(subject)
        first.feed(f"{self.start}a")
        got = parse(second, [f"{self.start}b{self.end}c"])
        assert (got.reasoning, got.content) == ("b", "c")

    @level(3)
    def test_work_is_linear(self, subject: Subject) -> None:
        """Long reasoning costs no more a chunk than short."""
        assert_linear(lambda: self._make(subject), self.start, "a b ")
