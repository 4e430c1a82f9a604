"""The suite of KV connectors on the twin, and the failing store's faults one by one."""

from __future__ import annotations

import pytest
from rabbet_sdk.conformance import KVConnectorConformance
from rabbet_sdk.fakes.clock import FakeClock
from rabbet_sdk.fakes.kv_store import FaultyStore


class TestStrict(KVConnectorConformance):
    plugin = "kv_connector/strict"


@pytest.mark.parametrize(
    ("fault", "polls"),
    [
        ("", [[b"abcdefgh"], [], [], [], []]),
        ("drop", [[], [], [], [], []]),
        ("delay", [[], [], [], [b"abcdefgh"], []]),
        ("reorder", [[], [b"abcdefgh"], [], [], []]),
        ("duplicate", [[b"abcdefgh"], [b"abcdefgh"], [], [], []]),
        ("truncate", [[b"abcd"], [], [], [], []]),
        ("flip", [[b"abcdefch"], [], [], [], []]),
        ("swap", [[b"other"], [], [], [], []]),
        ("evict", [[None], [], [], [], []]),
    ],
)
def test_a_get_fails_as_planned(fault: str, polls: list[list[bytes | None]]) -> None:
    store = FaultyStore()
    store.entries = {"k": b"abcdefgh", "z": b"other"}
    store.plan([fault])
    ticket = store.get("k")
    answers = [store.poll() for _ in polls]
    assert [[answer for _, answer in found] for found in answers] == polls
    assert {number for found in answers for number, _ in found} <= {ticket}


def test_a_full_store_refuses_and_an_error_raises() -> None:
    store = FaultyStore()
    store.plan(["full", "error"])
    ticket = store.put("k", b"v")
    assert store.poll() == [(ticket, None)] and not store.contains("k")
    with pytest.raises(ConnectionError):
        store.put("k", b"v")
    with pytest.raises(ValueError, match="unknown fault 'typo'"):
        store.plan(["typo"])


def test_a_store_that_hangs_answers_afterwards_and_a_lost_one_raises() -> None:
    store = FaultyStore()
    store.put("k", b"v")
    store.is_hanging = True
    assert store.poll() == []
    store.heal()
    assert len(store.poll()) == 1
    store.is_lost = True
    with pytest.raises(ConnectionError):
        store.contains("k")


def test_time_passes_when_told_and_never_back() -> None:
    clock = FakeClock(5.0)
    clock.sleep(2.5)
    assert clock() == 7.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
