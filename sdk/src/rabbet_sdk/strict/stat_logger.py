"""A stat logger that keeps totals in memory and appends them as JSON lines when it is flushed.

The path comes from the environment variable ``RABBET_STATS_FILE``; without it nothing is written.
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rabbet.contracts import register_stat_logger
from rabbet.contracts.observability import RequestRecord, StatLogger
from rabbet.contracts.scheduler import SchedulerStats
from rabbet_sdk.strict import seal

__all__ = ["StrictLogger"]

_MAX_LINES = 10_000


@register_stat_logger("strict")
@seal
class StrictLogger(StatLogger):
    """Called from the front end's loop, so that nothing here waits for a disk before ``close``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.path = os.environ.get("RABBET_STATS_FILE")
        # Bounded: a server that runs for months must not grow.
        self.lines: deque[str] = deque(maxlen=_MAX_LINES)

    def on_stats(self, stats: SchedulerStats) -> None:
        """One line."""
        self.lines.append(json.dumps({"stats": asdict(stats)}))

    def on_request(self, record: RequestRecord) -> None:
        """One line."""
        self.lines.append(json.dumps({"request": asdict(record)}))

    def close(self) -> None:
        """Write what there is, once."""
        if self.path and self.lines:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write("\n".join(self.lines) + "\n")
        self.lines.clear()
