"""Suite of tool-call parsers."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from rabbet_sdk.conformance._parsing import Parsed, assert_linear, check_chunkings, parse
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.tokenizer import PieceTokenizer

__all__ = ["ToolParserConformance"]

_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class ToolParserConformance(PluginConformance):
    """Subclass it and set ``plugin``; for other formats also ``call``, which must hold add({"x": 1}), and ``marks``.

    Attributes:
        call: Text of one call.
        marks: What the format is made of, to build hostile texts from; the first opens a call.
        hostile: The body of a call that must not be evaluated; ``{code}`` stands for Python code.
    """

    kind = "tool_parser"
    call: ClassVar[str] = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>", '{"name": "add"', "}", "<tool_", "</tool")
    hostile: ClassVar[str] = "<tool_call>{code}</tool_call>"
    knobs = PluginConformance.knobs | {"call", "marks", "hostile"}

    def _make(self, subject: Subject) -> Any:
        return subject.plugin_class(PieceTokenizer(["a", "b"]), _TOOLS)

    def test_any_chunking_equals_the_whole(self, subject: Subject) -> None:
        """However the text is cut."""

        def check(_text: str, parsed: Parsed) -> None:
            for _, arguments in parsed.calls:
                json.loads(arguments)

        check_chunkings(lambda: self._make(subject), (*self.marks, self.call, "a", " é\n", "<", '"'), check)

    def test_calls_and_content_come_out(self, subject: Subject) -> None:
        """Two calls in their order, with the text around them."""
        got = parse(self._make(subject), [f"one {self.call}{self.call} two"])
        assert [(name, json.loads(arguments)) for name, arguments in got.calls] == [("add", {"x": 1})] * 2
        assert got.content.split() == ["one", "two"], f"content is {got.content!r}"
        plain = parse(self._make(subject), ["no call < here"])
        assert (plain.content, plain.calls) == ("no call < here", [])

    def test_unfinished_call_is_content(self, subject: Subject) -> None:
        """Text that ends inside of a call, before its name, is not lost."""
        text = f"a {self.marks[0]}" + '{"na'
        got = parse(self._make(subject), [text])
        assert (got.content, got.calls) == (text, [])

    def test_text_is_never_evaluated(self, subject: Subject, tmp_path: Any) -> None:
        """Python in the place of JSON runs not."""
        proof = tmp_path / "ran"
        code = f"__import__('pathlib').Path({str(proof)!r}).touch()"
        parse(self._make(subject), [self.hostile.replace("{code}", code)])
        assert not proof.exists(), "the parser evaluated the model's text"

    @level(3)
    def test_responses_share_no_state(self, subject: Subject) -> None:
        """Two responses side by side."""
        first, second = self._make(subject), self._make(subject)
        first.feed(f"{self.call}{self.marks[0]}x")
        assert len(parse(second, [self.call]).calls) == 1

    @level(3)
    def test_work_is_linear(self, subject: Subject) -> None:
        """A long open call costs no more a chunk than a short one."""
        assert_linear(lambda: self._make(subject), self.marks[0], "abcdefgh " * 4)
