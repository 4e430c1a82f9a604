"""A store of bytes in memory, with answers that come later, and every fault that a remote store can have.

Requests are tickets; answers are fetched with ``poll`` and never block. Faults are planned one request at a time, so a
test says exactly what goes wrong, and ``is_hanging`` holds back all answers until it is cleared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["FAULTS", "FaultyStore"]

FAULTS = ("drop", "delay", "reorder", "duplicate", "truncate", "flip", "swap", "full", "error", "evict")
"""``drop``: no answer. ``delay``: three polls later. ``reorder``: behind all others. ``duplicate``: answered again in
the next poll. ``truncate``, ``flip``: half of the bytes, one other bit. ``swap``: the bytes of another key. ``full``: a
put is refused. ``error``: the call raises ConnectionError. ``evict``: the entry is gone before it is read."""

_DELAY_POLLS = 3


class FaultyStore:
    """Maps keys to bytes. ``put`` and ``get`` return tickets; ``poll`` gives (ticket, answer) pairs.

    Attributes:
        entries: What is stored.
        is_hanging: While set, no answer comes.
        is_lost: While set, the peer is gone: every call raises ConnectionError, and no answer comes.
        num_calls: Calls of ``put`` and ``get`` so far.
    """

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.is_hanging = False
        self.is_lost = False
        self.num_calls = 0
        self._faults: deque[str] = deque()
        self._answers: list[tuple[int, int, bytes | None]] = []
        self._num_polls = 0

    def plan(self, faults: Iterable[str]) -> None:
        """Faults of the next calls of ``put`` and ``get``, one each; an empty string is none.

        Raises:
            ValueError: If a fault is unknown.
        """
        for fault in faults:
            if fault and fault not in FAULTS:
                raise ValueError(f"unknown fault {fault!r}; possible: {', '.join(FAULTS)}")
            self._faults.append(fault)

    def heal(self) -> None:
        """From now on everything works; answers that were dropped do not come back."""
        self._faults.clear()
        self.is_hanging = self.is_lost = False

    def contains(self, key: str) -> bool:
        """Whether ``key`` is stored now."""
        if self.is_lost:
            raise ConnectionError("the store is gone")
        return key in self.entries

    def put(self, key: str, value: bytes) -> int:
        """Store ``value``; the answer is ``b""``, or None if it was refused."""
        ticket, fault = self._begin()
        if fault == "full":
            self._answer(ticket, None, "")
            return ticket
        if fault != "drop":
            self.entries[key] = self._bend(key, bytes(value), fault)
        self._answer(ticket, b"", fault)
        return ticket

    def get(self, key: str) -> int:
        """Fetch a value; the answer is its bytes, or None if there are none."""
        ticket, fault = self._begin()
        if fault == "evict":
            self.entries.pop(key, None)
        value = self.entries.get(key)
        self._answer(ticket, None if value is None else self._bend(key, value, fault), fault)
        return ticket

    def poll(self) -> list[tuple[int, bytes | None]]:
        """Answers that are there; each once, unless the fault is ``duplicate``."""
        self._num_polls += 1
        if self.is_hanging or self.is_lost:
            return []
        due = [item for item in self._answers if item[0] <= self._num_polls]
        self._answers = [item for item in self._answers if item[0] > self._num_polls]
        return [(ticket, answer) for _, ticket, answer in due]

    def _begin(self) -> tuple[int, str]:
        if self.is_lost:
            raise ConnectionError("the store is gone")
        self.num_calls += 1
        fault = self._faults.popleft() if self._faults else ""
        if fault == "error":
            raise ConnectionError("the connection was reset")
        return self.num_calls, fault

    def _bend(self, key: str, value: bytes, fault: str) -> bytes:
        if fault == "truncate":
            return value[: len(value) // 2]
        if fault == "flip" and value:
            middle = len(value) * 3 // 4
            return value[:middle] + bytes([value[middle] ^ 4]) + value[middle + 1 :]
        if fault == "swap":
            return next((other for name, other in sorted(self.entries.items()) if name != key), value)
        return value

    def _answer(self, ticket: int, answer: bytes | None, fault: str) -> None:
        due = self._num_polls + 1
        if fault == "drop":
            return
        if fault == "delay":
            self._answers.append((due + _DELAY_POLLS, ticket, answer))
        elif fault == "reorder":
            self._answers.append((due + 1, ticket, answer))
        else:
            self._answers.append((due, ticket, answer))
        if fault == "duplicate":
            self._answers.append((due + 1, ticket, answer))
