"""A publisher of KV events that writes JSON lines to a file or a named pipe: ``endpoint`` is ``file:///path``.

Each line holds the number of the ``publish`` call and its events; hashes are hexadecimal.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from threading import Condition, Thread
from typing import Any

from rabbet.contracts import register_kv_event_publisher
from rabbet.contracts.observability import KVEvent, KVEventPublisher
from rabbet_sdk.strict import seal

__all__ = ["StrictPublisher"]

_MAX_WAITING = 4096
"""Lines that wait for the reader."""
_FLUSH_S = 1.0
"""How long ``close`` waits for a reader that takes nothing."""


@register_kv_event_publisher("strict")
@seal
class StrictPublisher(KVEventPublisher):
    """The engine only appends to a queue; a thread writes, so that a slow reader never holds up a step."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.number = 0
        # Bounded: the oldest lines are lost first, and the gap in the numbers tells the reader so.
        self.waiting: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self.changed = Condition()
        self.deadline: float | None = None
        path = str(config.endpoint).removeprefix("file://")
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
        self.thread = Thread(target=self.write, name="kv-events", daemon=True)
        self.thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Number and encode at once: the list belongs to the engine, and a line that is lost has a number too."""
        line = json.dumps({"number": self.number, "events": [asdict(event) for event in events]}, default=bytes.hex)
        self.number += 1
        with self.changed:
            self.waiting.append(line.encode() + b"\n")
            self.changed.notify()

    def write(self) -> None:
        """Runs in the thread until all is written after ``close``, or until its deadline."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.deadline is not None)
                if not self.waiting:
                    return
                line = self.waiting.popleft()
            while line:
                if self.deadline is not None and time.monotonic() > self.deadline:
                    return
                # A pipe that is full is asked again; only so can the thread notice ``close``.
                if select.select([], [self.file], [], 0.05)[1]:
                    line = line[os.write(self.file, line) :]

    def close(self) -> None:
        """Write what waits; without a reader give up in time."""
        if self.deadline is not None:
            return
        with self.changed:
            self.deadline = time.monotonic() + _FLUSH_S
            self.changed.notify()
        self.thread.join()
        os.close(self.file)
