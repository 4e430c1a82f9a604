"""The scheduler's dealings with a KV connector: what it is asked and told, and blocks that a transfer still uses.

An asynchronous load has the request wait, with blocks, outside all queues. Blocks of a request that ended stay until
the connector has let go of them: a load that writes them, or a save that reads them, is not ordered with the steps as
the runner's own use of them is.

A connector is a plugin: whatever its answers raise is logged and costs the hit, never the engine. Only the message of a
step must be made, since requests of that step rely on it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rabbet.contracts.kv_connector import ConnectorScheduler, ExternalHit
from rabbet.contracts.scheduler import KVManager
from rabbet.sched.entry import Entry
from rabbet.types.outputs import KVTransferResult
from rabbet.types.request import Request, RequestStatus

__all__ = ["Transfers"]

logger = logging.getLogger(__name__)
_NOTHING = ExternalHit(num_tokens=0)


@dataclass(slots=True)
class _Held:
    """Blocks of a request that ended, and what still uses them."""

    request: Request
    is_loading: bool
    is_saving: bool


class Transfers:
    """Does nothing, cheaply, without a connector."""

    def __init__(self, connector: ConnectorScheduler | None, kv: KVManager) -> None:
        self._connector = connector
        self._kv = kv
        self._loading: dict[str, Entry] = {}
        self._held: dict[str, _Held] = {}

    @property
    def is_busy(self) -> bool:
        """Whether steps must go on, even without tokens, so that the worker half can report."""
        return bool(self._loading or self._held)

    @property
    def num_loading(self) -> int:
        """Requests that wait for a load."""
        return len(self._loading)

    def holds(self, request_id: str) -> bool:
        """Whether blocks of an ended request of that id are still in use."""
        return request_id in self._held

    def find_hit(self, entry: Entry, num_local_tokens: int, unit: int) -> ExternalHit:
        """What can be had beyond the local hit; never the last known token. ``num_tokens`` None: ask again later.

        Args:
            entry: A waiting request.
            num_local_tokens: The local hit.
            unit: Block size; the answer is cut to a multiple of it.
        """
        if self._connector is None or entry.is_local_only:
            return _NOTHING
        request = entry.request
        try:
            hit = self._connector.find_hit(request, num_local_tokens)
        except Exception:
            logger.exception("the KV connector failed to look up %s; it is computed here", request.request_id)
            entry.is_local_only = True
            return _NOTHING
        if hit.num_tokens is None:
            return hit
        room = (request.num_known_tokens - 1) // unit * unit - num_local_tokens
        return ExternalHit(num_tokens=max(0, min(hit.num_tokens // unit * unit, room)), is_async=hit.is_async)

    def announce(self, entry: Entry, num_external_tokens: int) -> bool:
        """Tell the connector which blocks to load into; False if it failed, and then nothing is loaded."""
        assert self._connector is not None
        request_id = entry.request.request_id
        try:
            self._connector.on_allocated(entry.request, self._kv.block_ids(request_id), num_external_tokens)
        except Exception:
            logger.exception("the KV connector refused the blocks of %s; it is computed here", request_id)
            entry.is_local_only = True
            return False
        return True

    def wait_for(self, entry: Entry, num_tokens: int) -> None:
        """An asynchronous load was announced; afterwards ``num_tokens`` are in the cache."""
        entry.num_loaded_tokens = num_tokens
        entry.request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._loading[entry.request.request_id] = entry

    def release(self, request: Request) -> dict[str, Any] | None:
        """A request ended: give its blocks back, now or when no transfer uses them any more.

        Returns:
            What the connector wants the client to know.
        """
        is_loading = self._loading.pop(request.request_id, None) is not None
        is_saving, params = False, None
        blocks = self._kv.block_ids(request.request_id) if self._connector is not None else []
        if self._connector is not None:
            try:
                is_saving, params = self._connector.on_finished(request, blocks)
            except Exception:
                logger.exception("the KV connector failed at the end of %s; its blocks are freed", request.request_id)
        if (is_loading or is_saving) and any(blocks):
            self._held[request.request_id] = _Held(request, is_loading, is_saving)
        else:
            self._kv.release(request)
        return params

    def message(self, num_scheduled_tokens: Mapping[str, int]) -> bytes | None:
        """What a plan carries to the worker half."""
        return None if self._connector is None else self._connector.build_transfer(num_scheduled_tokens)

    def take(self, report: KVTransferResult) -> Iterator[Entry]:
        """Take in a report; yields requests whose asynchronous load is over (see ``has_failed_load``)."""
        if self._connector is not None:
            try:
                self._connector.on_result(report)
            except Exception:
                logger.exception("the KV connector failed to take in a report")
        for request_id, blocks in report.failed_block_ids.items():
            if any(blocks) and (entry := self._loading.get(request_id)) is not None:
                entry.has_failed_load = True
        for request_id in report.finished_saving:
            if (held := self._held.get(request_id)) is not None:
                held.is_saving = False
                self._let_go(held)
        for request_id in report.finished_loading:
            if (held := self._held.get(request_id)) is not None:
                held.is_loading = False
                self._let_go(held)
            elif (entry := self._loading.pop(request_id, None)) is not None:
                yield entry

    def _let_go(self, held: _Held) -> None:
        if not (held.is_loading or held.is_saving):
            del self._held[held.request.request_id]
            self._kv.release(held.request)

    def loading_ids(self) -> set[str]:
        """Ids of requests that wait for a load."""
        return set(self._loading)
