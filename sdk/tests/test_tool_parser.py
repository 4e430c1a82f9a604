"""The suite of tool parsers on the twin."""

from __future__ import annotations

from rabbet_sdk.conformance import ToolParserConformance


class TestStrict(ToolParserConformance):
    plugin = "tool_parser/strict"
