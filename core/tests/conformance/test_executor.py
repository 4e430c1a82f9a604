"""Core's own executors pass the suite that plugins are held to."""

from __future__ import annotations

from rabbet_sdk.conformance import ExecutorConformance


class TestUni(ExecutorConformance):
    plugin = "executor/uni"


class TestMultiprocess(ExecutorConformance):
    plugin = "executor/mp"
