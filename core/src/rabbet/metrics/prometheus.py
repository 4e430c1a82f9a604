"""The text of ``/metrics``: Rabbet's names, and on demand the reference engine's for existing dashboards."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from rabbet.contracts.scheduler import SchedulerStats
from rabbet.metrics.stats import HISTOGRAMS, FrontStats

__all__ = ["render_metrics"]

_LABELS = ("model_name", "engine")
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class _Snapshot(Collector):
    """All metrics at one moment."""

    def __init__(
        self, prefix: str, labels: tuple[str, ...], front: FrontStats, engine: SchedulerStats | None, digest: str
    ) -> None:
        self._prefix, self._labels, self._front, self._engine, self._digest = prefix, labels, front, engine, digest

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        if engine is not None:
            yield from self._engine_metrics(engine)
        finished = CounterMetricFamily(
            f"{self._prefix}:request_success", "Finished requests.", labels=(*_LABELS, "finished_reason")
        )
        for reason in _FINISH_REASONS:
            finished.add_metric((*self._labels, reason), self._front.finished[reason])
        yield finished
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in a cache.", self._front.cached_tokens)
        yield self._counter("unknown_request_fields", "Ignored fields of requests.", self._front.unknown_fields)
        for name, (text, bounds) in HISTOGRAMS.items():
            yield self._histogram(name, text, bounds)
        info = GaugeMetricFamily(
            f"{self._prefix}:composition_info", "The composition's digest.", labels=(*_LABELS, "digest")
        )
        info.add_metric((*self._labels, self._digest), 1)
        yield info

    def _engine_metrics(self, engine: SchedulerStats) -> Iterator[Metric]:
        gauges = (
            ("num_requests_running", "Requests in the batch.", engine.num_running),
            ("num_requests_waiting", "Requests that wait.", engine.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", engine.kv_usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = (
            ("prompt_tokens", "Prompt tokens taken in.", engine.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", engine.num_generation_tokens),
            ("num_preemptions", "Preemptions.", engine.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", engine.prefix_queries),
            ("prefix_cache_hits", "Tokens found there.", engine.prefix_hits),
            ("engine_steps", "Steps.", engine.num_steps),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", engine.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", engine.num_accepted_tokens),
        )
        for name, text, count in counters:
            yield self._counter(name, text, count)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Metric:
        histogram = self._front.histograms[name]
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        cumulative, buckets = 0, []
        for bound, count in zip((*bounds, float("inf")), histogram.counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), cumulative))
        family.add_metric(self._labels, buckets, histogram.total)
        return family


def render_metrics(
    front: FrontStats, engine: SchedulerStats | None, *, model: str, digest: str, compat: str = "none"
) -> bytes:
    """Prometheus text.

    Args:
        front: The front's counters.
        engine: The engine's newest numbers, if there are any.
        model: Served model name, for the label.
        digest: Of the composition.
        compat: ``vllm`` also writes the reference engine's names.
    """
    registry = CollectorRegistry()
    labels = (model, "0")
    registry.register(_Snapshot("rabbet", labels, front, engine, digest))
    if compat == "vllm":
        registry.register(_Snapshot("vllm", labels, front, engine, digest))
    return generate_latest(registry)
