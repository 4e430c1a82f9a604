"""The suite of executors on the twin."""

from __future__ import annotations

from rabbet_sdk.conformance import ExecutorConformance


class TestStrict(ExecutorConformance):
    plugin = "executor/strict"
