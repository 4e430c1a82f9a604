"""The suite of publishers of KV events: every event once and in order, losses are seen, the engine never waits.

An author gives ``sink``: where the events go, which can be read and left unread.
"""

from __future__ import annotations

import gc
import json
import os
import select
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest

from rabbet.config.schema import KVEventsConfig
from rabbet.contracts.observability import KVEvent
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject

__all__ = ["FileSink", "KVEventsConformance", "Sink"]

Messages = list[tuple[int, list[KVEvent]]]
"""Sequence number and events of each message, in the order of arrival."""


class Sink(Protocol):
    """Where a publisher sends to. Nothing takes the messages until ``reading`` is entered.

    Attributes:
        config: What the publisher is built with.
    """

    config: Any

    def reading(self) -> AbstractContextManager[None]:
        """While it is open, messages are taken as they come."""
        ...

    def read(self) -> Messages:
        """All messages that came so far; called after the publisher was closed."""
        ...


class FileSink:
    """A named pipe with lines of JSON, the form of the template; it takes 64 KiB before somebody reads."""

    def __init__(self, directory: Path) -> None:
        path = directory / "events"
        os.mkfifo(path)
        # Opened for writing too: so a publisher can open it, and its end is no end of the file.
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._data = b""
        self.config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"file://{path}")

    def _take(self) -> None:
        while select.select([self._file], [], [], 0)[0]:
            self._data += os.read(self._file, 1 << 16)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See ``Sink``."""
        done = threading.Event()

        def run() -> None:
            while not done.is_set():
                if select.select([self._file], [], [], 0.02)[0]:
                    self._take()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def read(self) -> Messages:
        """See ``Sink``; a line that was cut by a publisher that gave up is left out."""
        self._take()
        found = []
        for line in self._data.splitlines(keepends=True):
            if line.endswith(b"\n"):
                row = json.loads(line)
                found.append((row["number"], [_event(item) for item in row["events"]]))
        return found


def _event(row: dict[str, Any]) -> KVEvent:
    parent = row.pop("parent_hash")
    return KVEvent(
        action=row.pop("action"),
        block_hashes=tuple(bytes.fromhex(item) for item in row.pop("block_hashes")),
        parent_hash=None if parent is None else bytes.fromhex(parent),
        token_ids=tuple(row.pop("token_ids")),
        **row,
    )


def _stored(number: int) -> KVEvent:
    return KVEvent(
        action="stored", block_hashes=(number.to_bytes(32, "big"),), parent_hash=None, block_size=16,
        token_ids=tuple(range(number, number + 16)),
    )  # fmt: skip


_EVERY = (
    KVEvent(action="cleared"),
    KVEvent(
        action="stored", block_hashes=(b"\0" * 32, bytes(range(32))), parent_hash=b"\xff" * 32, block_size=4,
        token_ids=(0, 2**31, 7, 7, 1, 2, 3, 151_935), group_id=3, medium="host",
    ),
    KVEvent(action="removed", block_hashes=(b"\n\r\"'" * 8,), group_id=1, medium="disk"),
    KVEvent(action="stored", block_hashes=(b"\x01",), parent_hash=b"\x01", token_ids=(5,), block_size=1),
    KVEvent(action="removed"),
)  # fmt: skip


class KVEventsConformance(PluginConformance):
    """Subclass, name the plugin, set ``sink``.

    Attributes:
        sink: ``(directory)`` to a ``Sink``.
        num_calls: Calls of ``publish`` that nobody reads, twice; more than a publisher lets wait.
        deadline_s: Seconds after which a call that is not back counts as waiting for a reader.
    """

    kind = "kv_events"
    sink: ClassVar[Callable[[Path], Sink]] = FileSink
    num_calls: ClassVar[int] = 5_000
    deadline_s: ClassVar[float] = 10.0
    knobs = PluginConformance.knobs | {"sink", "num_calls", "deadline_s"}

    def _open(self, subject: Subject, directory: Path) -> tuple[Sink, Any]:
        directory.mkdir(exist_ok=True)
        sink = type(self).sink(directory)
        return sink, subject.plugin_class(sink.config)

    def test_every_event_arrives_once_and_in_order(self, subject: Subject, tmp_path: Path) -> None:
        """After ``close``, each under the number that follows the one before; closing again adds nothing."""
        sink, publisher = self._open(subject, tmp_path)
        sent: list[KVEvent] = []
        with sink.reading():
            for size in (1, 3, 2, 0, 40, 1):
                events = [_stored(len(sent) + i) for i in range(size)]
                sent += events
                publisher.publish(events)
                # The engine fills the list anew in its next step.
                events[:] = [KVEvent(action="cleared")] * 5
            publisher.close()
            publisher.close()
        messages = sink.read()
        assert [event for _, events in messages for event in events] == sent
        numbers = [number for number, _ in messages]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"numbers have gaps: {numbers}"

    def test_every_field_arrives(self, subject: Subject, tmp_path: Path) -> None:
        """Bytes of any value, no parent, groups, media, the largest ids, and what has no blocks."""
        sink, publisher = self._open(subject, tmp_path)
        with sink.reading():
            for event in _EVERY:
                publisher.publish([event])
            publisher.publish(_EVERY)
            publisher.close()
        got = [event for _, events in sink.read() for event in events]
        for mine, wanted in zip(got, _EVERY * 2, strict=True):
            assert mine == wanted, f"{wanted} arrives as {mine}"

    @level(3)
    def test_two_publishers_share_no_state(self, subject: Subject, tmp_path: Path) -> None:
        """Each sends its own events, with numbers of its own, twice over."""
        for turn in ("one", "two"):
            opened = [self._open(subject, tmp_path / f"{turn}-{half}") for half in "ab"]
            with opened[0][0].reading(), opened[1][0].reading():
                for number in range(6):
                    opened[number % 2][1].publish([_stored(number)])
                for _, publisher in opened:
                    publisher.close()
            for half, (sink, _) in enumerate(opened):
                messages = sink.read()
                assert [event for _, events in messages for event in events] == [
                    _stored(n) for n in (half, 2 + half, 4 + half)
                ]
                assert [number - messages[0][0] for number, _ in messages] == [0, 1, 2], "numbers are shared"

    @level(3)
    def test_the_engine_never_waits(self, subject: Subject, tmp_path: Path) -> None:
        """``publish`` comes back though nobody reads, and so does ``close``."""
        _, publisher = self._open(subject, tmp_path)
        calls = range(self.num_calls)
        _in_time(self.deadline_s, lambda: [publisher.publish([_stored(number)]) for number in calls], "publish")
        _in_time(self.deadline_s, publisher.close, "close")

    @level(3)
    def test_memory_is_bounded_when_nobody_reads(self, subject: Subject, tmp_path: Path) -> None:
        """As many calls again add less than 1 MiB to what waits."""
        _, publisher = self._open(subject, tmp_path)

        def run() -> int:
            for number in range(self.num_calls):
                publisher.publish([_stored(number)])
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            first = run()
            grown = run() - first
        finally:
            tracemalloc.stop()
            publisher.close()
        assert grown < 1 << 20, f"{grown} bytes more after {self.num_calls} calls that nobody reads"

    @level(3)
    def test_lost_events_are_a_gap_in_the_numbers(self, subject: Subject, tmp_path: Path) -> None:
        """Of what was published while nobody read, anything may be lost, but a reader who comes back can tell."""
        sink, publisher = self._open(subject, tmp_path)
        for number in range(self.num_calls):
            publisher.publish([_stored(number)])
        with sink.reading():
            publisher.publish([_stored(self.num_calls)])
            publisher.close()
        messages = sink.read()
        got = [int.from_bytes(event.block_hashes[0], "big") for _, events in messages for event in events]
        assert got == sorted(set(got)), "events come twice or in another order"
        assert got and got[-1] == self.num_calls, "the last event, which somebody waited for, is lost"
        numbers = [number for number, _ in messages]
        assert numbers == sorted(set(numbers)), "numbers do not rise"
        lost = [
            (before, after)
            for (old, before), (new, after) in zip(
                zip(numbers, got, strict=True), zip(numbers[1:], got[1:], strict=True), strict=False
            )
            if after - before != 1 and new - old == 1
        ]
        assert not lost, f"events between {lost[0][0]} and {lost[0][1]} are lost, and the numbers show no gap"

    @level(3)
    def test_no_thread_stays(self, subject: Subject, tmp_path: Path) -> None:
        """``close`` ends what was started."""
        before = set(threading.enumerate())
        sink, publisher = self._open(subject, tmp_path)
        with sink.reading():
            publisher.publish([_stored(1)])
            publisher.close()
        left = [thread.name for thread in set(threading.enumerate()) - before]
        assert not left, f"threads stay after close: {left}"


def _in_time(deadline_s: float, call: Callable[[], Any], name: str) -> None:
    """Run ``call`` in a thread; fail if it is not back within the deadline, or has failed."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            outcome.append(None)
        except BaseException as error:  # noqa: BLE001 - told in the test's own thread
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome:
        pytest.fail(f"{name} waits for a reader: it is not back after {deadline_s:g} s")
    if outcome[0] is not None:
        raise outcome[0]
