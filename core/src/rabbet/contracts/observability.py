"""Contracts of stat loggers and KV-event publishers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rabbet.contracts.scheduler import SchedulerStats

__all__ = ["KVEvent", "KVEventPublisher", "RequestRecord", "StatLogger"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One finished request, as a front end saw it. Times in seconds; ``most_output_tokens`` are those of its longest
    output."""

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str
    queued_s: float
    time_to_first_token_s: float | None
    total_s: float
    num_preemptions: int = 0
    most_output_tokens: int = 0


class StatLogger(ABC):
    """Receives numbers; called from the front end, must not block."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def on_stats(self, stats: SchedulerStats) -> None:
        """Engine gauges and counters, about once a second."""

    @abstractmethod
    def on_request(self, record: RequestRecord) -> None:
        """A request has ended."""

    def close(self) -> None:
        """Flush; idempotent."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class KVEvent:
    """``stored``, ``removed`` or ``cleared`` blocks of one group and medium."""

    action: str
    block_hashes: tuple[bytes, ...] = ()
    parent_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()
    block_size: int = 0
    group_id: int = 0
    medium: str = "device"


class KVEventPublisher(ABC):
    """Sends KV events with sequence numbers."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def publish(self, events: Sequence[KVEvent]) -> None:
        """Events of one step, in order; must not block the engine."""

    def close(self) -> None:
        """Flush; idempotent."""
        return None
