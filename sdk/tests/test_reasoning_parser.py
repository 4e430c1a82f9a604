"""The suite of reasoning parsers on the twin."""

from __future__ import annotations

from rabbet_sdk.conformance import ReasoningParserConformance


class TestStrict(ReasoningParserConformance):
    plugin = "reasoning_parser/strict"
