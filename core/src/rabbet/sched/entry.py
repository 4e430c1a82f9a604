"""What the scheduler keeps in its own memory: of each request, of the plan being made, and of plans under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.request import Request

__all__ = ["Entry", "Flight", "FlightRow", "PlanDraft"]


@dataclass(slots=True, eq=False)
class Entry:
    """A request, and what nobody but the scheduler needs to know of it.

    Attributes:
        request: The request.
        epoch: Moves on when the request is preempted or ends; results of plans made before are then dropped.
        has_row: The runner has, or with the plan being made gets, a row for it.
        has_reported: A delta has been made.
        num_prompt_logprobs: Prompt positions reported so far, so that recomputation does not report them again.
        num_loaded_tokens: Tokens whose KV it holds before it runs, from a finished load; 0 if none.
        num_external_tokens: Tokens that the connector loads or has loaded.
        skips_caches: It is computed whole: no hit of any cache is used.
        is_local_only: The connector is not asked for it (any more).
        has_failed_load: Its asynchronous load has failed, but is not over.
        prefill_hashes: Blocks that it computes now and that others may wait for.
        prefill_end: Tokens that are computed when none of them is under way any more.
    """

    request: Request
    epoch: int = 0
    has_row: bool = False
    has_reported: bool = False
    num_prompt_logprobs: int = 0
    num_loaded_tokens: int = 0
    num_external_tokens: int = 0
    skips_caches: bool = False
    is_local_only: bool = False
    has_failed_load: bool = False
    prefill_hashes: list[bytes] = field(default_factory=list)
    prefill_end: int = 0


@dataclass(frozen=True, slots=True)
class FlightRow:
    """One request of a plan under way: it computes positions start .. start + count - 1."""

    entry: Entry
    epoch: int
    start: int
    count: int
    samples: bool

    @property
    def is_stale(self) -> bool:
        """Whether the request was preempted or ended since, so that its result counts for nothing."""
        return self.epoch != self.entry.epoch


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan under way."""

    plan: StepPlan
    rows: list[FlightRow]


@dataclass(slots=True)
class PlanDraft:
    """A plan being made."""

    tokens_left: int
    new: list[NewRequest] = field(default_factory=list)
    running: dict[str, RunningRequest] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    has_preempted: bool = False

    def count(self, request: Request, num_tokens: int) -> None:
        """Give a request tokens of this step; those past its known ones are drafts."""
        self.counts[request.request_id] = num_tokens
        self.tokens_left -= num_tokens
        if request.draft_token_ids:
            known = request.num_known_tokens + request.num_pending_tokens
            num_drafts = request.num_computed_tokens + num_tokens - known
            if num_drafts > 0:
                self.drafts[request.request_id] = request.draft_token_ids[:num_drafts]
            request.draft_token_ids = []

    def drop(self, request_id: str) -> None:
        """Take a running request that was preempted out again."""
        self.tokens_left += self.counts.pop(request_id, 0)
        self.running.pop(request_id, None)
        self.drafts.pop(request_id, None)
