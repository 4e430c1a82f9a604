"""Counts what happens to requests. One object a front process, changed in its event loop only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from rabbet.contracts.observability import RequestRecord

__all__ = ["HISTOGRAMS", "FrontStats", "Histogram"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SMALL = (1, 2, 5, 10, 20, 50, 100)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of a streamed output.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time a token after the first.", _SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Time from arrival to the first scheduling.", _SECONDS),
    "request_prefill_time_seconds": ("Time from the first scheduling to the first token.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("Time from the first scheduling to the last token.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens that were computed, not found in a cache.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest output of a request.", _TOKENS),
    "request_num_preemptions": ("Preemptions of a request.", (0, 1, 2, 3, 5, 10, 20, 50)),
    "request_params_n": ("Outputs that a request asks for.", _SMALL),
    "request_params_max_tokens": ("Limit on new tokens that a request sets.", _TOKENS),
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
        """Count one value; a bucket holds what is at most its bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class FrontStats:
    """Everything that the front counts. Keys are from closed sets: nothing that a client chooses becomes one.

    Attributes:
        finished: Requests by finish reason.
        rejections: Requests that were not taken, by reason.
        responses: HTTP responses by route template and status.
        plugin_failures: Failed calls of listeners, by plugin.
        unknown_fields: Request fields that were ignored, in all.
        cached_tokens: Prompt tokens that were found in a cache.
        histograms: By name.
    """

    finished: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    plugin_failures: Counter[str] = field(default_factory=Counter)
    unknown_fields: int = 0
    cached_tokens: int = 0
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram.of(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
    )

    def observe_response(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        self.responses[route, status] += 1

    def observe_params(self, n: int, max_tokens: int | None) -> None:
        """Count what a request asked for."""
        self.histograms["request_params_n"].observe(n)
        if max_tokens is not None:
            self.histograms["request_params_max_tokens"].observe(max_tokens)

    def observe_request(self, record: RequestRecord) -> None:
        """Count a finished request."""
        self.finished[record.finish_reason] += 1
        self.cached_tokens += record.num_cached_tokens
        self._observe("e2e_request_latency_seconds", record.total_s)
        self._observe("request_queue_time_seconds", record.queued_s)
        self._observe("request_prompt_tokens", record.num_prompt_tokens)
        self._observe("request_generation_tokens", record.num_output_tokens)
        self._observe("request_prefill_kv_computed_tokens", record.num_prompt_tokens - record.num_cached_tokens)
        self._observe("request_max_num_generation_tokens", record.most_output_tokens)
        self._observe("request_num_preemptions", record.num_preemptions)
        first = record.time_to_first_token_s
        if first is None:
            return
        decode = max(record.total_s - first, 0.0)
        self._observe("time_to_first_token_seconds", first)
        # The two clocks of engine and front may differ by a hair.
        self._observe("request_prefill_time_seconds", max(first - record.queued_s, 0.0))
        self._observe("request_inference_time_seconds", max(record.total_s - record.queued_s, 0.0))
        self._observe("request_decode_time_seconds", decode)
        if record.num_output_tokens > 1:
            self._observe("request_time_per_output_token_seconds", decode / (record.num_output_tokens - 1))

    def observe_gap(self, seconds: float, count: int) -> None:
        """Count the time between two deliveries, the second one of ``count`` tokens."""
        self._observe("inter_token_latency_seconds", seconds / max(count, 1))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)
