"""The queue of waiting requests: first come, first served, or by priority."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from rabbet.types.request import Request

__all__ = ["FcfsQueue", "PriorityQueue", "RequestQueue", "priority_key"]


def priority_key(request: Request) -> tuple[int, float, str]:
    """Order of requests under the priority policy: priority, then arrival, then id."""
    return (request.spec.priority, request.spec.arrival_time_s, request.request_id)


class RequestQueue(ABC):
    """Waiting requests in the order in which they are admitted."""

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
    def pop(self) -> Request:
        """Take the next one."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take one out of the middle."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._items: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """See ``RequestQueue``."""
        self._items.append(request)

    def put_back(self, request: Request) -> None:
        """See ``RequestQueue``."""
        self._items.appendleft(request)

    def peek(self) -> Request:
        """See ``RequestQueue``."""
        return self._items[0]

    def pop(self) -> Request:
        """See ``RequestQueue``."""
        return self._items.popleft()

    def remove(self, request: Request) -> None:
        """See ``RequestQueue``."""
        self._items.remove(request)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)


class PriorityQueue(RequestQueue):
    """Lowest priority number first; ties by arrival, then by id."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], Request]] = []

    def add(self, request: Request) -> None:
        """See ``RequestQueue``."""
        heapq.heappush(self._heap, (priority_key(request), request))

    def put_back(self, request: Request) -> None:
        """Its key decides, as before."""
        self.add(request)

    def peek(self) -> Request:
        """See ``RequestQueue``."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """See ``RequestQueue``."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """See ``RequestQueue``."""
        self._heap = [item for item in self._heap if item[1] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda item: item[0]))
