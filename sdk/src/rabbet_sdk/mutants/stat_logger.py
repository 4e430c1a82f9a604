"""Stat loggers with one fault each, on top of the strict twin."""

from __future__ import annotations

from collections import deque
from typing import Any

from rabbet.contracts import register_stat_logger
from rabbet.contracts.observability import RequestRecord
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.stat_logger import StrictLogger

__all__ = ["MUTANTS"]

_SHARED: deque[str] = deque()


@register_stat_logger("shared_buffer")
class SharedBuffer(StrictLogger):
    """All instances write what any of them was told."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lines = _SHARED


@register_stat_logger("closes_twice")
class ClosesTwice(StrictLogger):
    """Keeps its lines, and writes them again."""

    def close(self) -> None:
        """See ``StatLogger``."""
        kept = list(self.lines)
        super().close()
        self.lines.extend(kept)


@register_stat_logger("grows")
class Grows(StrictLogger):
    """Keeps every record."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lines = deque()


@register_stat_logger("loses_records")
class LosesRecords(StrictLogger):
    """Tells the last request only."""

    def on_request(self, record: RequestRecord) -> None:
        """See ``StatLogger``."""
        if self.lines and '"request"' in self.lines[-1]:
            self.lines.pop()
        super().on_request(record)
        if len(self.lines) > 4:
            self.lines.popleft()


def _mutant(name: str, target: type, caught_by: str, story: str) -> Mutant:
    return Mutant(name=name, target=f"{__name__}:{target.__name__}", caught_by=f"test_{caught_by}", story=story)


MUTANTS = (
    _mutant("shared_buffer", SharedBuffer, "two_loggers_share_no_state", "a module's global as a buffer"),
    _mutant("closes_twice", ClosesTwice, "every_number_arrives_once", "close is called by two owners"),
    _mutant("grows", Grows, "memory_is_bounded_and_no_thread_stays", "a list that nobody empties"),
    _mutant("loses_records", LosesRecords, "every_number_arrives_once", "only the newest numbers are kept"),
)
