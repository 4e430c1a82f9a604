"""The periodic log line: throughput, queues, KV cache."""

from __future__ import annotations

from rabbet.contracts.scheduler import SchedulerStats

__all__ = ["ThroughputLine"]


class ThroughputLine:
    """Makes a line of the difference between two looks at the engine's counters; silent while nothing happens."""

    def __init__(self, now_s: float) -> None:
        self._time_s = now_s
        self._last: SchedulerStats | None = None
        self._was_idle = True

    def line(self, stats: SchedulerStats, now_s: float) -> str | None:
        """The line for the time since the last call, or None where this one and the last found an idle engine.

        Args:
            stats: The engine's newest numbers.
            now_s: A monotonic clock.
        """
        span_s = max(now_s - self._time_s, 1e-9)
        old, self._last, self._time_s = self._last, stats, now_s
        num_prompt = stats.num_prompt_tokens - (old.num_prompt_tokens if old else 0)
        num_generated = stats.num_generation_tokens - (old.num_generation_tokens if old else 0)
        is_idle = not (stats.num_running or stats.num_waiting or num_prompt or num_generated)
        was_idle, self._was_idle = self._was_idle, is_idle
        if is_idle and was_idle:
            return None
        queries = stats.prefix_queries - (old.prefix_queries if old else 0)
        hits = stats.prefix_hits - (old.prefix_hits if old else 0)
        return (
            f"prompt {num_prompt / span_s:.1f} tokens/s, generation {num_generated / span_s:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, KV cache {100 * stats.kv_usage:.1f}%, "
            f"prefix cache hits {100 * hits / queries if queries else 0:.1f}%"
        )
