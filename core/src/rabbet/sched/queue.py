"""The queue of waiting requests: first come, first served, or by priority."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from rabbet.types.request import Request

__all__ = ["FcfsQueue", "PriorityQueue", "RequestQueue", "priority_key"]


def priority_key(request: Request) -> tuple[int, float, str]:
    """Order of requests under the priority policy: priority, then arrival, then id."""
    return (request.spec.priority, request.spec.arrival_time_s, request.request_id)


class RequestQueue(ABC):
    """Waiting requests in the order in which they are admitted. Ids are unique within it.

    ``remove`` costs no more than ``add``: when a client with thousands of waiting requests leaves, all are removed.
    """

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """A request that was preempted, or could not be admitted: it goes before new ones of its rank."""

    @abstractmethod
    def peek(self) -> Request:
        """The next one."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take one out, wherever it stands."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In order."""


class FcfsQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """See ``RequestQueue``."""
        self._items[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """See ``RequestQueue``."""
        self._items[request.request_id] = request
        self._items.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """See ``RequestQueue``."""
        return next(iter(self._items.values()))

    def remove(self, request: Request) -> None:
        """See ``RequestQueue``."""
        del self._items[request.request_id]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items.values())


class PriorityQueue(RequestQueue):
    """Lowest priority number first; ties by arrival, then by id. Removed requests leave the heap when they reach its top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], int, Request]] = []
        self._tickets: dict[str, int] = {}
        # A request that was removed and comes again has another ticket than its old entry in the heap.
        self._counter = itertools.count()

    def add(self, request: Request) -> None:
        """See ``RequestQueue``."""
        ticket = self._tickets[request.request_id] = next(self._counter)
        heapq.heappush(self._heap, (priority_key(request), ticket, request))

    def put_back(self, request: Request) -> None:
        """Its key decides, as before."""
        self.add(request)

    def peek(self) -> Request:
        """See ``RequestQueue``."""
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def remove(self, request: Request) -> None:
        """See ``RequestQueue``."""
        del self._tickets[request.request_id]
        if not self._tickets:
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._tickets) + 64:
            self._heap = [item for item in self._heap if self._is_live(item)]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Request]:
        return (item[2] for item in sorted(filter(self._is_live, self._heap)))

    def _is_live(self, item: tuple[tuple[int, float, str], int, Request]) -> bool:
        return self._tickets.get(item[2].request_id) == item[1]
