"""Publishers of KV events with one fault each, on top of the strict twin."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rabbet.contracts import register_kv_event_publisher
from rabbet.contracts.observability import KVEvent
from rabbet_sdk.mutants.base import planter
from rabbet_sdk.strict.kv_events import StrictPublisher

__all__ = ["MUTANTS"]

Events = Sequence[KVEvent]

_plant = planter(globals(), register_kv_event_publisher, StrictPublisher)


def _write_at_once(self: Any, events: Events) -> None:
    StrictPublisher.publish(self, events)
    os.set_blocking(self.file, True)
    with self.changed:
        while self.waiting:
            os.write(self.file, self.waiting.popleft())


def _unbounded(self: Any, config: Any) -> None:
    StrictPublisher.__init__(self, config)
    with self.changed:
        self.waiting = deque(self.waiting)


def _number_when_written(self: Any, events: Events) -> None:
    """The queue drops lines; numbers are given to what is left."""
    if len(self.waiting) < 2000:
        StrictPublisher.publish(self, events)
    else:
        with self.changed:
            last = json.loads(self.waiting.pop())
            self.number = last["number"]
        StrictPublisher.publish(self, events)


def _later(self: Any, events: Events) -> None:
    last, self.__dict__["last"] = self.__dict__.get("last"), events
    if last is not None:
        StrictPublisher.publish(self, last)


def _close_later(self: Any) -> None:
    if self.__dict__.get("last") is not None:
        StrictPublisher.publish(self, self.__dict__.pop("last"))
    StrictPublisher.close(self)


def _no_groups(self: Any, events: Events) -> None:
    StrictPublisher.publish(self, [replace(event, group_id=0) for event in events])


def _no_parent(self: Any, events: Events) -> None:
    StrictPublisher.publish(self, [replace(event, parent_hash=event.parent_hash or b"") for event in events])


_numbers: list[None] = []


def _shared_numbers(self: Any, events: Events) -> None:
    self.number = len(_numbers)
    _numbers.append(None)
    StrictPublisher.publish(self, events)


def _close_and_leave(self: Any) -> None:
    """Never tells the thread to end."""
    with self.changed:
        self.changed.wait_for(lambda: not self.waiting, timeout=0.5)


def _close_forever(self: Any) -> None:
    if self.deadline is None:
        with self.changed:
            self.deadline = float("inf")
            self.changed.notify()
        self.thread.join()
        os.close(self.file)


_SOON = "deadline_s = 2.0"
"""Nothing comes later than that."""
MUTANTS = (
    _plant(
        "writes_at_once", "the_engine_never_waits", "Each step waits for the reader.", publish=_write_at_once, knobs=_SOON,
    ),
    _plant(
        "close_waits_for_ever", "the_engine_never_waits", "A server that cannot be stopped.", close=_close_forever, knobs=_SOON,
    ),
    _plant("no_bound", "memory_is_bounded_when_nobody_reads", "A queue without an end.", __init__=_unbounded),
    _plant(
        "silent_loss", "lost_events_are_a_gap_in_the_numbers", "Routers keep blocks that are gone.",
        publish=_number_when_written,
    ),
    _plant(
        "keeps_the_list", "every_event_arrives_once_and_in_order", "Encodes a list that the engine fills anew.",
        publish=_later, close=_close_later,
    ),
    _plant("group_lost", "every_field_arrives", "Groups of hybrid models are mixed up.", publish=_no_groups),
    _plant("no_parent_is_empty", "every_field_arrives", "None becomes an empty hash.", publish=_no_parent),
    _plant("shared_numbers", "two_publishers_share_no_state", "One counter a process.", publish=_shared_numbers),
    _plant("thread_left", "no_thread_stays", "The thread outlives close.", close=_close_and_leave),
)  # fmt: skip
"""The zoo of publishers of KV events."""
