"""The suite of stat loggers on the twin."""

from __future__ import annotations

from rabbet_sdk.conformance import StatLoggerConformance


class TestStrict(StatLoggerConformance):
    plugin = "stat_logger/strict"
