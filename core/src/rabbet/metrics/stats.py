"""Counts what happens to requests, for metrics and for the periodic line. One object a front process."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from rabbet.contracts.observability import RequestRecord
from rabbet.contracts.scheduler import SchedulerStats

__all__ = ["HISTOGRAMS", "FrontStats", "Histogram", "ThroughputWindow"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of an output.", _SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Time from arrival to the first scheduling.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of an output.", _TOKENS),
}
"""Name to help text and upper bounds of buckets."""


@dataclass(slots=True)
class Histogram:
    """Counts a bucket, and the sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """An empty one; the last bucket is open."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count one value."""
        from bisect import bisect_left

        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class FrontStats:
    """Everything that the front counts.

    Attributes:
        finished: Requests by finish reason, a closed set.
        unknown_fields: Request fields that were ignored, counted in all: names come from clients and are no labels.
        rejected: Refused requests by HTTP status class.
        cached_tokens: Prompt tokens that were found in the prefix cache.
        histograms: By name.
    """

    finished: Counter[str] = field(default_factory=Counter)
    unknown_fields: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram.of(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
    )

    def observe_request(self, record: RequestRecord) -> None:
        """Count a finished request."""
        self.finished[record.finish_reason] += 1
        self.cached_tokens += record.num_cached_tokens
        histograms = self.histograms
        histograms["e2e_request_latency_seconds"].observe(record.total_s)
        histograms["request_queue_time_seconds"].observe(record.queued_s)
        histograms["request_prompt_tokens"].observe(record.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(record.num_output_tokens)
        if record.time_to_first_token_s is not None:
            histograms["time_to_first_token_seconds"].observe(record.time_to_first_token_s)

    def observe_gap(self, seconds: float, count: int) -> None:
        """Count the time between two deliveries of ``count`` tokens."""
        self.histograms["inter_token_latency_seconds"].observe(seconds / max(count, 1))


class ThroughputWindow:
    """Tokens a second between two looks at the engine's counters."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, SchedulerStats]] = deque(maxlen=2)

    def line(self, stats: SchedulerStats) -> str:
        """The periodic log line."""
        now = time.monotonic()
        self._points.append((now, stats))
        (before, old), (after, new) = self._points[0], self._points[-1]
        span = max(after - before, 1e-9) if len(self._points) == 2 else 1.0
        prompt = (new.num_prompt_tokens - old.num_prompt_tokens) / span
        generated = (new.num_generation_tokens - old.num_generation_tokens) / span
        hit_rate = 100 * new.prefix_hits / new.prefix_queries if new.prefix_queries else 0.0
        return (
            f"prompt {prompt:.1f} tokens/s, generation {generated:.1f} tokens/s, running {new.num_running}, "
            f"waiting {new.num_waiting}, KV cache {100 * new.kv_usage:.1f}%, prefix cache hits {hit_rate:.1f}%"
        )
