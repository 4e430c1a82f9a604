"""What the scheduler counts since its start."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from rabbet.contracts.scheduler import ITERATION_TOKEN_BOUNDS

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """See ``SchedulerStats`` for the meaning of each."""

    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    local_cached_tokens: int = 0
    external_cached_tokens: int = 0
    external_queries: int = 0
    external_hits: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    iteration_tokens: int = 0
    iteration_counts: list[int] = field(default_factory=lambda: [0] * (len(ITERATION_TOKEN_BOUNDS) + 1))

    def count_step(self, num_tokens: int) -> None:
        """A plan was made. One without tokens, which only lets a KV connector report, is no iteration."""
        self.steps += 1
        if num_tokens:
            self.iteration_tokens += num_tokens
            self.iteration_counts[bisect_left(ITERATION_TOKEN_BOUNDS, num_tokens)] += 1

    def count_prompt(self, num_tokens: int, num_cached: int, num_external: int) -> None:
        """A prompt is taken in: ``num_cached`` of its tokens are there already, ``num_external`` at most from elsewhere."""
        external = min(num_external, num_cached)
        self.prompt_tokens += num_tokens
        self.external_cached_tokens += external
        self.local_cached_tokens += num_cached - external

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """The first ``num_accepted`` of the drafts of one request and step were right."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        self.accepted_at += [0] * (num_drafts - len(self.accepted_at))
        for position in range(num_accepted):
            self.accepted_at[position] += 1
