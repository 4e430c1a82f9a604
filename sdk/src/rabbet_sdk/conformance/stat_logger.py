"""The suite of stat loggers: every number arrives once, calls return at once, memory is bounded, closing is idempotent.

An author gives ``read``: what reached the logger's destination, as (request ids, numbers of steps).
"""

from __future__ import annotations

import gc
import json
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rabbet.contracts.observability import RequestRecord
from rabbet.contracts.scheduler import SchedulerStats
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject

__all__ = ["StatLoggerConformance"]

STATS = SchedulerStats(
    num_running=1, num_waiting=2, kv_usage=0.5, prefix_queries=3, prefix_hits=1, num_preemptions=0, num_steps=1
)
RECORD = RequestRecord(
    request_id="a", model="m", num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=2, finish_reason="stop",
    queued_s=0.1, time_to_first_token_s=None, total_s=0.5,
)  # fmt: skip
_FILE = "RABBET_STATS_FILE"


def _prepare(directory: Path) -> dict[str, str]:
    return {_FILE: str(directory / "stats.jsonl")}


def _read(directory: Path) -> tuple[list[str], list[int]]:
    file = directory / "stats.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    requests = [row["request"]["request_id"] for row in rows if "request" in row]
    return requests, [row["stats"]["num_steps"] for row in rows if "stats" in row]


class StatLoggerConformance(PluginConformance):
    """Subclass, name the plugin, set ``environment`` and ``read``.

    Attributes:
        environment: ``(directory)`` to environment variables that point the logger at the directory.
        read: ``(directory)`` to (request ids, ``num_steps`` of each stats call) that arrived there, in order.
        config: What the logger is built with.
        num_calls: Calls of the test of memory.
    """

    kind = "stat_logger"
    environment: ClassVar[Callable[[Path], dict[str, str]]] = staticmethod(_prepare)
    read: ClassVar[Callable[[Path], tuple[list[str], list[int]]]] = staticmethod(_read)
    config: ClassVar[Any] = None
    num_calls: ClassVar[int] = 60_000
    knobs = PluginConformance.knobs | {"environment", "read", "config", "num_calls"}

    def _make(self, subject: Subject, directory: Path, patch: pytest.MonkeyPatch) -> Any:
        directory.mkdir(exist_ok=True)
        for key, value in type(self).environment(directory).items():
            patch.setenv(key, value)
        return subject.plugin_class(self.config)

    def test_every_number_arrives_once(self, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each record and each stats call, in order, after ``close``; closing again adds nothing."""
        logger = self._make(subject, tmp_path, monkeypatch)
        for number in range(5):
            logger.on_stats(replace(STATS, num_steps=number))
            logger.on_request(replace(RECORD, request_id=f"r{number}"))
        logger.close()
        logger.close()
        assert type(self).read(tmp_path) == ([f"r{n}" for n in range(5)], list(range(5)))

    def test_two_loggers_share_no_state(
        self, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each writes what it was told, twice over."""
        for turn in ("one", "two"):
            logger = self._make(subject, tmp_path / f"{turn}-a", monkeypatch)
            other = self._make(subject, tmp_path / f"{turn}-b", monkeypatch)
            logger.on_request(RECORD)
            other.on_request(replace(RECORD, request_id="b"))
            logger.close()
            other.close()
            assert type(self).read(tmp_path / f"{turn}-a")[0] == ["a"]
            assert type(self).read(tmp_path / f"{turn}-b")[0] == ["b"]

    @level(3)
    def test_memory_is_bounded_and_no_thread_stays(
        self, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that runs for months does not grow, and ``close`` ends what was started."""
        before = set(threading.enumerate())
        logger = self._make(subject, tmp_path, monkeypatch)
        for _ in range(self.num_calls // 2):
            logger.on_request(RECORD)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(self.num_calls // 2):
                logger.on_request(RECORD)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        allowed = self.num_calls // 2 * 16
        logger.close()
        # Lines that replace older ones count as new, so that what a bounded buffer holds is allowed for.
        assert grown <= allowed + 8 * (1 << 20), f"{grown} bytes more after {self.num_calls // 2} records"
        left = [thread.name for thread in set(threading.enumerate()) - before]
        assert not left, f"threads stay after close: {left}"
