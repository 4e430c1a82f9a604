"""Counters, their text for Prometheus, and the periodic line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rabbet.contracts.observability import RequestRecord
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.metrics.log import ThroughputLine
from rabbet.metrics.prometheus import Served, render_metrics
from rabbet.metrics.stats import HISTOGRAMS, FrontStats, Histogram

IDLE = SchedulerStats(num_running=0, num_waiting=0, kv_usage=0.0, prefix_queries=0, prefix_hits=0, num_preemptions=0)


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": "x", "model": "m", "num_prompt_tokens": 10, "num_cached_tokens": 4, "num_output_tokens": 5, "finish_reason": "stop",
        "queued_s": 0.5, "time_to_first_token_s": 1.5, "total_s": 3.5,
    }  # fmt: skip
    return RequestRecord(**(values | changes))


def samples(front: FrontStats, engine: SchedulerStats | None = None, **more: Any) -> dict[str, float]:
    text = render_metrics(front, engine, Served(model='a"b\\c\n', digest="d"), **more).decode()
    return {
        f"{s.name}{s.labels.get('le', '')}": s.value for f in text_string_to_metric_families(text) for s in f.samples
    }


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram.of((1, 2))
    for value in (0.5, 1, 1.5, 2, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1] and histogram.total == 7.5


def test_times_of_a_request_add_up() -> None:
    stats = FrontStats()
    stats.observe_request(record())
    totals = {name: histogram.total for name, histogram in stats.histograms.items()}
    assert totals["request_prefill_time_seconds"] + totals["request_decode_time_seconds"] == pytest.approx(3.0)
    assert totals["request_inference_time_seconds"] == 3.0 and totals["request_time_per_output_token_seconds"] == 0.5
    assert totals["e2e_request_latency_seconds"] == 3.5 and stats.cached_tokens == 4 and stats.finished == {"stop": 1}


def test_a_request_without_a_token_has_no_token_times() -> None:
    stats = FrontStats()
    stats.observe_request(record(time_to_first_token_s=None, num_output_tokens=0, finish_reason="abort"))
    assert sum(stats.histograms["time_to_first_token_seconds"].counts) == 0
    assert sum(stats.histograms["e2e_request_latency_seconds"].counts) == 1


def test_text_holds_every_family_and_hostile_names_do_no_harm() -> None:
    stats = FrontStats()
    stats.observe_request(record())
    stats.observe_gap(0.2, 2)
    stats.observe_params(2, None)
    found = samples(stats, replace(IDLE, num_running=3, num_prompt_tokens=7, prefix_hits=2))
    for name in HISTOGRAMS:
        assert f"rabbet:{name}_count" in found and found[f"rabbet:{name}_bucket+Inf"] == found[f"rabbet:{name}_count"]
    assert found["rabbet:num_requests_running"] == 3 and found["rabbet:prompt_tokens_total"] == 7
    assert found["rabbet:inter_token_latency_seconds_sum"] == 0.1 and found["rabbet:request_params_n_count"] == 1
    assert found["rabbet:request_params_max_tokens_count"] == 0 and found["rabbet:prefix_cache_hits_total"] == 2


def test_buckets_grow() -> None:
    stats = FrontStats()
    for seconds in (0.002, 0.3, 0.3, 1000):
        stats.observe_gap(seconds, 1)
    found = samples(stats)
    buckets = [value for name, value in found.items() if name.startswith("rabbet:inter_token_latency_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 4 and buckets[-2] == 3


def test_the_engines_numbers_are_absent_until_it_is_there() -> None:
    assert not [name for name in samples(FrontStats()) if "num_requests_running" in name]


def test_the_reference_names_come_beside_ours() -> None:
    found = samples(FrontStats(), IDLE, compat="vllm")
    ours = {name.removeprefix("rabbet:") for name in found if name.startswith("rabbet:")}
    assert ours == {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}


def test_the_line_tells_of_the_time_since_the_last_one() -> None:
    line = ThroughputLine(100.0)
    busy = replace(
        IDLE, num_running=2, num_waiting=1, kv_usage=0.25, num_prompt_tokens=50, num_generation_tokens=20, prefix_queries=40, prefix_hits=10
    )  # fmt: skip
    first = line.line(busy, 110.0)
    assert first == (
        "prompt 5.0 tokens/s, generation 2.0 tokens/s, running 2, waiting 1, KV cache 25.0%, prefix cache hits 25.0%"
    )
    second = line.line(replace(busy, num_generation_tokens=40), 115.0)
    assert second is not None and "generation 4.0" in second and "prompt 0.0" in second and "hits 0.0%" in second


def test_the_line_is_silent_while_nothing_happens_and_closes_a_busy_time() -> None:
    line = ThroughputLine(0.0)
    assert line.line(IDLE, 10.0) is None
    assert line.line(replace(IDLE, num_running=1), 20.0) is not None
    assert line.line(IDLE, 30.0) is not None
    assert line.line(IDLE, 40.0) is None
    short = replace(IDLE, num_prompt_tokens=5, num_generation_tokens=1)
    assert line.line(short, 50.0) is not None, "work that began and ended between two looks is told, too"


def test_numbers_of_the_engine_with_labels_and_buckets() -> None:
    engine = replace(
        IDLE, num_waiting=5, num_waiting_deferred=2, num_prompt_tokens=30, num_local_cached_tokens=8, num_external_cached_tokens=4,
        external_queries=9, external_hits=4, num_drafts=6, num_accepted_at=(4, 1), num_iteration_tokens=110, iteration_token_counts=(3, 0, 0, 0, 0, 1, *[0] * 8),
    )  # fmt: skip
    text = render_metrics(FrontStats(), engine, Served(model="m"), compat="vllm").decode()
    for prefix in ("rabbet", "vllm"):
        found = {
            (
                s.name.removeprefix(f"{prefix}:"),
                *(v for k, v in s.labels.items() if k not in ("model_name", "engine")),
            ): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.name.startswith(f"{prefix}:")
        }
        assert found["num_requests_waiting_by_reason", "capacity"] == 3
        assert found["num_requests_waiting_by_reason", "deferred"] == 2
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        assert [found["prompt_tokens_by_source_total", source] for source in sources] == [18, 8, 4]
        assert [found["spec_decode_num_accepted_tokens_per_pos_total", place] for place in "01"] == [4, 1]
        assert found["spec_decode_num_drafts_total",] == 6 and found["external_prefix_cache_hits_total",] == 4
        assert (
            found["iteration_tokens_total_bucket", "1.0"] == 3 and found["iteration_tokens_total_bucket", "128.0"] == 4
        )
        assert found["iteration_tokens_total_count",] == 4 and found["iteration_tokens_total_sum",] == 110


def test_an_engine_that_has_not_stepped_has_empty_buckets() -> None:
    assert samples(FrontStats(), IDLE)["rabbet:iteration_tokens_total_bucket+Inf"] == 0


def test_the_front_process_reports_itself() -> None:
    assert samples(FrontStats())["process_resident_memory_bytes"] > 1 << 20


def test_preemptions_computed_tokens_and_the_longest_output_of_a_request() -> None:
    stats = FrontStats()
    stats.observe_request(record(num_preemptions=2, most_output_tokens=3))
    found = samples(stats)
    assert (
        found["rabbet:request_num_preemptions_bucket1.0"] == 0
        and found["rabbet:request_num_preemptions_bucket2.0"] == 1
    )
    assert found["rabbet:request_prefill_kv_computed_tokens_sum"] == 6
    assert found["rabbet:request_max_num_generation_tokens_sum"] == 3
