"""Core's own schedulers pass the suite that plugins are held to."""

from __future__ import annotations

from rabbet_sdk.conformance import SchedulerConformance


class TestFcfs(SchedulerConformance):
    plugin = "scheduler/fcfs"


class TestPriority(SchedulerConformance):
    plugin = "scheduler/priority"
