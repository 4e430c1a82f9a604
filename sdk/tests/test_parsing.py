"""Work of parsers is counted: ways to look at everything again are seen, and the same text counts the same each time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from rabbet_sdk.conformance._parsing import _Meter, _Text, assert_linear

MARK = re.compile("</x>")


class Parser:
    """Keeps all text in ``parts``; ``look`` is done with each chunk."""

    look: Callable[[Any], Any] = staticmethod(lambda _parser: None)
    keeps_text = False

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.text = ""

    def feed(self, text: str) -> None:
        self.parts.append(text)
        if self.keeps_text:
            self.text += text
        type(self).look(self)

    def finish(self) -> str:
        return "".join(self.parts)


LOOKS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "grows": (True, lambda _parser: None),
    "find": (True, lambda parser: parser.text.find("</x>")),
    "in": (True, lambda parser: "</x>" in parser.text),
    "regex": (True, lambda parser: MARK.search(parser.text)),
    "joined": (False, lambda parser: "".join(parser.parts).count("}")),
    "json": (True, lambda parser: json.JSONDecoder().scan_once('"' + parser.text + '"', 0)),
    "loop": (False, lambda parser: [part for part in parser.parts if part is None]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_everything_again_is_seen(name: str) -> None:
    keeps, look = LOOKS[name]
    cls = type("Quadratic", (Parser,), {"look": staticmethod(look), "keeps_text": keeps})
    with pytest.raises(AssertionError, match="8 is linear"):
        assert_linear(cls, "<x>", "abcdefgh " * 4)


def test_looking_at_the_new_part_is_linear() -> None:
    class Linear(Parser):
        @staticmethod
        def look(parser: Any) -> None:
            tail = "".join(parser.parts[-2:])
            assert "</x>" not in tail and tail.find("</x>") < 0 and not MARK.search(tail)

    assert_linear(Linear, "<x>", "abcdefgh " * 4)


def test_counts_are_the_same_each_time() -> None:
    def work() -> int:
        meter = _Meter()
        with meter.counting():
            text = _Text("ab") + "cd"
            text = "x" + text
            assert text[1:3] == "ab" and text.find("d") == 4 and {text: 1}["xabcd"] == 1
        return meter.work

    assert work() == work() > 10
