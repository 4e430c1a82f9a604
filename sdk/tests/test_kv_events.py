"""The suite of publishers of KV events on the twin, and its pipe by hand."""

from __future__ import annotations

import os
from pathlib import Path

from rabbet_sdk.conformance import KVEventsConformance
from rabbet_sdk.conformance.kv_events import FileSink

from rabbet.contracts.observability import KVEvent


class TestStrict(KVEventsConformance):
    plugin = "kv_events/strict"


def test_pipe_by_hand(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    line = (
        b'{"number": 4, "events": [{"action": "stored", "block_hashes": ["00ff"], "parent_hash": null, "token_ids": [1], '
        b'"block_size": 1, "group_id": 2, "medium": "host"}]}\n'
    )
    file = os.open(tmp_path / "events", os.O_WRONLY)
    os.write(file, line + line[:20])
    os.close(file)
    event = KVEvent(
        action="stored", block_hashes=(b"\x00\xff",), token_ids=(1,), block_size=1, group_id=2, medium="host"
    )
    assert sink.read() == [(4, [event])]
