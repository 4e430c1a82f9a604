"""The text of ``/metrics``: Rabbet's names, and on demand the reference engine's for existing dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from rabbet.contracts.scheduler import ITERATION_TOKEN_BOUNDS, SchedulerStats
from rabbet.metrics.stats import HISTOGRAMS, FrontStats, Histogram

__all__ = ["Served", "render_metrics"]

_LABELS = ("model_name", "engine")
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_REJECTIONS = ("queue_full", "starting", "draining", "engine_dead")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What is served, for labels. Empty while the engine starts.

    Attributes:
        model: First served name.
        digest: Of the composition.
        block_size: Tokens a KV block.
        num_blocks: Blocks of the KV cache.
    """

    model: str = ""
    digest: str = ""
    block_size: int = 0
    num_blocks: int = 0


class _Snapshot(Collector):
    """All metrics at one moment, under one prefix."""

    def __init__(self, prefix: str, front: FrontStats, engine: SchedulerStats | None, served: Served) -> None:
        self._prefix, self._front, self._engine, self._served = prefix, front, engine, served
        self._labels = (served.model, "0")

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        front = self._front
        if self._engine is not None:
            yield from self._engine_metrics(self._engine)
        yield self._by("request_success", "Finished requests.", "finished_reason", front.finished, _FINISH_REASONS)
        yield self._by("admission_rejections", "Requests that were not taken.", "reason", front.rejections, _REJECTIONS)
        yield self._responses()
        failures = front.plugin_failures
        yield self._by("plugin_failures", "Failed calls of hooks and stat loggers.", "plugin", failures, tuple(failures))
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in a cache.", front.cached_tokens)
        yield self._counter("unknown_request_fields", "Ignored fields of requests.", front.unknown_fields)
        for name, (text, _) in HISTOGRAMS.items():
            yield self._buckets(name, text, front.histograms[name])
        yield self._info("composition_info", "The composition's digest.", digest=self._served.digest)
        yield self._info(
            "cache_config_info",
            "Sizes of the KV cache.",
            block_size=str(self._served.block_size),
            num_gpu_blocks=str(self._served.num_blocks),
        )

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
            ("external_prefix_cache_queries", "Tokens that a KV connector was asked for.", engine.external_queries),
            ("external_prefix_cache_hits", "Tokens that it had.", engine.external_hits),
            ("spec_decode_num_drafts", "Drafts verified.", engine.num_drafts),
            ("engine_steps", "Steps.", engine.num_steps),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", engine.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", engine.num_accepted_tokens),
        )
        for name, text, count in counters:
            yield self._counter(name, text, count)
        yield from self._engine_families(engine)

    def _engine_families(self, engine: SchedulerStats) -> Iterator[Metric]:
        """Numbers of the engine with a label or with buckets."""
        waiting = GaugeMetricFamily(
            f"{self._prefix}:num_requests_waiting_by_reason",
            "Requests that wait for room (capacity) or for a KV connector (deferred).",
            labels=(*_LABELS, "reason"),
        )
        deferred = min(engine.num_waiting_deferred, engine.num_waiting)
        waiting.add_metric((*self._labels, "capacity"), engine.num_waiting - deferred)
        waiting.add_metric((*self._labels, "deferred"), deferred)
        yield waiting
        local, external = engine.num_local_cached_tokens, engine.num_external_cached_tokens
        sources = {"local_cache_hit": local, "external_kv_transfer": external}
        sources["local_compute"] = max(engine.num_prompt_tokens - local - external, 0)
        text = "Prompt tokens by where their KV comes from."
        yield self._by("prompt_tokens_by_source", text, "source", sources, tuple(sources))
        positions = {str(position): count for position, count in enumerate(engine.num_accepted_at)}
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the draft."
        yield self._by(name, text, "position", positions, tuple(positions))
        counts = engine.iteration_token_counts or (0,) * (len(ITERATION_TOKEN_BOUNDS) + 1)
        histogram = Histogram(ITERATION_TOKEN_BOUNDS, list(counts), engine.num_iteration_tokens)
        yield self._buckets("iteration_tokens_total", "Tokens of a step.", histogram)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _by(self, name: str, text: str, label: str, counts: dict[str, int], known: Sequence[str]) -> Metric:
        """A counter over a closed set, zeros included, so that rates begin at the first event."""
        counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for value in known:
            counter.add_metric((*self._labels, value), counts.get(value, 0))
        return counter

    def _responses(self) -> Metric:
        counter = CounterMetricFamily(
            f"{self._prefix}:http_responses", "HTTP responses.", labels=(*_LABELS, "route", "status")
        )
        for (route, status), count in sorted(self._front.responses.items()):
            counter.add_metric((*self._labels, route, str(status)), count)
        return counter

    def _info(self, name: str, text: str, **values: str) -> Metric:
        gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, *values))
        gauge.add_metric((*self._labels, *values.values()), 1)
        return gauge

    def _buckets(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        cumulative, buckets = 0, []
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), cumulative))
        family.add_metric(self._labels, buckets, histogram.total)
        return family


def render_metrics(front: FrontStats, engine: SchedulerStats | None, served: Served, *, compat: str = "none") -> bytes:
    """Prometheus text.

    Args:
        front: The front's counters.
        engine: The engine's newest numbers, if there are any.
        served: What is served.
        compat: ``vllm`` also writes the reference engine's names.
    """
    registry = CollectorRegistry()
    # Memory, processor time and open files of the front process, under the names that every exporter has.
    ProcessCollector(registry=registry)
    registry.register(_Snapshot("rabbet", front, engine, served))
    if compat == "vllm":
        registry.register(_Snapshot("vllm", front, engine, served))
    return generate_latest(registry)
