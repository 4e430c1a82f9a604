"""The engine's books of open requests: every accepted request gets exactly one last delta, whatever a plugin does."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rabbet.types.outputs import FinishReason, RequestDelta

__all__ = ["Ledger"]

logger = logging.getLogger(__name__)


class Ledger:
    """Ids of requests that were accepted and have no last delta yet."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    def ids(self) -> list[str]:
        """Open requests, oldest first."""
        return list(self._open)

    def open(self, request_id: str) -> None:
        """A request was accepted."""
        self._open[request_id] = None

    def passing(self, deltas: Iterable[RequestDelta]) -> list[RequestDelta]:
        """The deltas that may go out: those of open requests. Last deltas close their request."""
        passed = []
        for delta in deltas:
            if delta.request_id not in self._open:
                logger.error("a delta of the request %s is dropped: it has ended already", delta.request_id)
                continue
            if delta.finish_reason is not None:
                del self._open[delta.request_id]
            passed.append(delta)
        return passed

    def end_missing(self, known: Iterable[str], reason: FinishReason, error: str | None) -> list[RequestDelta]:
        """Last deltas for open requests that the scheduler no longer knows, because what it said of them was lost."""
        alive = set(known)
        missing = [request_id for request_id in self._open if request_id not in alive]
        return [RequestDelta(request_id=request_id, finish_reason=reason, error=error) for request_id in missing]
