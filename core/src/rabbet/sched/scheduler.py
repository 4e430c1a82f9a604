"""The scheduler: token counts a request and step, no phases.

Running requests come first, then waiting ones, within the budgets of tokens, requests and blocks. A running request
that finds no block preempts the one that can wait best; a preempted request gives all blocks back and is computed
anew, which the prefix cache makes cheap.

Async scheduling: ``schedule`` counts tokens that the step before will sample (``num_pending_tokens``) as known. A
result that arrives for a request which was preempted or ended since its plan is dropped, because the request's
``epoch`` moved on. Blocks given back while a step that reads them runs may be handed out at once: the runner executes
plans strictly in order, so a later plan writes them only after that step.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rabbet.contracts import register_scheduler
from rabbet.contracts.scheduler import CacheHit, Scheduler, SchedulerContext, SchedulerStats
from rabbet.errors import InvalidRequestError, OverloadedError
from rabbet.kv.groups import blocks_for_one_request
from rabbet.sched.queue import FcfsQueue, PriorityQueue, RequestQueue, priority_key
from rabbet.sched.stop import check_stop
from rabbet.types.outputs import FinishReason, RequestDelta, StepResult
from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.request import EngineRequest, Request, RequestStatus

__all__ = ["FcfsScheduler", "PriorityScheduler"]


@dataclass(slots=True)
class _Flight:
    """A plan under way: for each of its requests the epoch, the tokens computed after it, and whether it samples."""

    plan: StepPlan
    rows: dict[str, tuple[int, int, bool]] = field(default_factory=dict)


@dataclass(slots=True)
class _Draft:
    """A plan being made."""

    tokens_left: int
    new: list[NewRequest] = field(default_factory=list)
    running: list[RunningRequest] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    preempted: bool = False


@dataclass(slots=True)
class _Counters:
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class _TokenScheduler(Scheduler):
    """What both policies share."""

    def __init__(self, context: SchedulerContext) -> None:
        """See ``Scheduler``."""
        super().__init__(context)
        self._kv = context.kv
        self._waiting: RequestQueue = self._make_queue()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._epochs: dict[str, int] = {}
        self._flights: deque[_Flight] = deque()
        self._gone: list[str] = []
        self._announced: set[str] = set()
        self._counters = _Counters()
        self._random = random.Random()
        self._next_step = 1

    def _make_queue(self) -> RequestQueue:
        return FcfsQueue()

    def _victim(self) -> Request:
        """The running request that can wait best."""
        return self._running[-1]

    # ---- requests come and go

    def add(self, request: EngineRequest) -> None:
        """See ``Scheduler``."""
        limit = self.context.max_num_queued_requests
        if limit is not None and len(self._waiting) >= limit:
            raise OverloadedError(f"{len(self._waiting)} requests wait already, the limit is {limit}; try again later")
        self._check(request)
        seed = request.sampling.seed
        state = Request(
            spec=request,
            token_ids=list(request.prompt_token_ids),
            seed=self._random.getrandbits(63) if seed is None else seed,
        )
        self._requests[request.request_id] = state
        self._epochs[request.request_id] = 0
        self._waiting.add(state)

    def _check(self, request: EngineRequest) -> None:
        """Refuse what can never be served."""
        context = self.context
        num_prompt = len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise InvalidRequestError(f"the request id {request.request_id} is in use", field="request_id")
        if num_prompt < 1:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if num_prompt >= context.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens, which leaves no room for output in the context of "
                f"{context.max_model_len}",
                field="prompt",
            )
        if not context.is_chunked_prefill and num_prompt > context.max_num_batched_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens, a step has {context.max_num_batched_tokens}, and chunked prefill is "
                "off",
                field="prompt",
            )
        needed = blocks_for_one_request(context.cache.groups, num_prompt + 1, context.max_num_batched_tokens)
        usable = context.cache.num_blocks - 1
        if needed > usable:
            block_size = context.cache.groups[0].spec.block_size
            raise InvalidRequestError(
                f"the prompt needs {needed} KV blocks, but the cache has {usable}: about "
                f"{usable // len(context.cache.groups) * block_size} tokens would fit",
                field="prompt",
            )

    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> list[RequestDelta]:
        """See ``Scheduler``."""
        deltas = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                deltas.append(self._end(request, reason, error=error))
        return deltas

    def _end(
        self, request: Request, reason: FinishReason, *, error: str | None = None, delta: RequestDelta | None = None
    ) -> RequestDelta:
        """Remove a request and make its last delta."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._kv.release(request)
        self._forget(request)
        del self._requests[request.request_id]
        del self._epochs[request.request_id]
        last = delta or self._delta(request)
        return RequestDelta(
            request_id=last.request_id,
            new_token_ids=last.new_token_ids,
            logprobs=last.logprobs,
            prompt_logprobs=last.prompt_logprobs,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            error=error,
            num_cached_tokens=last.num_cached_tokens,
            queued_s=last.queued_s,
            num_preemptions=request.num_preemptions,
        )

    def _forget(self, request: Request) -> None:
        """Tell the runner, with the next plan, that a row is free."""
        if request.request_id in self._announced:
            self._announced.discard(request.request_id)
            self._gone.append(request.request_id)

    def _delta(self, request: Request) -> RequestDelta:
        first = request.first_scheduled_time_s
        return RequestDelta(
            request_id=request.request_id,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            queued_s=None if first is None else max(0.0, first - request.spec.arrival_time_s),
        )

    # ---- planning

    def schedule(self) -> StepPlan | None:
        """See ``Scheduler``."""
        draft = _Draft(tokens_left=self.context.max_num_batched_tokens)
        self._schedule_running(draft)
        if not draft.preempted:
            self._schedule_waiting(draft)
        if not draft.counts:
            return None
        plan = StepPlan(
            step_id=self._take_step_id(),
            new_requests=draft.new,
            running_requests=draft.running,
            num_scheduled_tokens=draft.counts,
            draft_token_ids=draft.drafts,
            finished_request_ids=self._take_gone(),
        )
        flight = _Flight(plan)
        for request_id, count in draft.counts.items():
            request = self._requests[request_id]
            known = request.num_known_tokens + request.num_pending_tokens + len(draft.drafts.get(request_id, ()))
            request.num_computed_tokens += count
            samples = request.num_computed_tokens >= known
            flight.rows[request_id] = (self._epochs[request_id], request.num_computed_tokens, samples)
            if samples:
                request.num_pending_tokens += 1
        self._flights.append(flight)
        self._counters.steps += 1
        return plan

    def _take_gone(self) -> list[str]:
        # A preempted request that comes back in this very plan is announced anew and must not be freed after that;
        # the runner frees rows before it makes new ones.
        gone, self._gone = self._gone, []
        return gone

    def _take_step_id(self) -> int:
        step_id, self._next_step = self._next_step, self._next_step + 1
        return step_id

    def _schedule_running(self, draft: _Draft) -> None:
        index = 0
        while index < len(self._running) and draft.tokens_left > 0:
            request = self._running[index]
            count = self._tokens_wanted(request, draft.tokens_left, is_alone=len(self._requests) == 1)
            if count == 0:
                index += 1
                continue
            blocks = self._allocate_or_preempt(request, count, draft)
            if blocks is None:
                break
            draft.running.append(
                RunningRequest(
                    request_id=request.request_id,
                    num_computed_tokens=request.num_computed_tokens,
                    new_block_ids=blocks,
                )
            )
            self._count(draft, request, count)
            # A victim that stood before this request shifts the list.
            index = self._running.index(request) + 1

    def _tokens_wanted(self, request: Request, tokens_left: int, *, is_alone: bool) -> int:
        """Tokens of this step for one running request; 0 if it waits for a result that surely ends it."""
        known = request.num_known_tokens + request.num_pending_tokens
        if request.num_pending_tokens:
            output = request.num_output_tokens + request.num_pending_tokens
            if output >= request.spec.max_tokens or known >= self.context.max_model_len:
                return 0
        count = known + len(request.draft_token_ids) - request.num_computed_tokens
        threshold = self.context.long_prefill_token_threshold
        if threshold and count > threshold and not is_alone:
            count = threshold
        return max(0, min(count, tokens_left))

    def _allocate_or_preempt(self, request: Request, count: int, draft: _Draft) -> list[list[int]] | None:
        """Blocks for a running request; None if it had to be preempted itself."""
        while True:
            blocks = self._kv.allocate(request, count)
            if blocks is not None:
                return blocks
            victim = self._victim()
            self._preempt(victim, draft)
            if victim is request:
                return None

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Give a running request's blocks back and queue it again; takes it out of the plan being made."""
        self._running.remove(request)
        self._kv.release(request)
        self._forget(request)
        draft.preempted = True
        if (count := draft.counts.pop(request.request_id, 0)) > 0:
            draft.tokens_left += count
            draft.running = [row for row in draft.running if row.request_id != request.request_id]
            draft.drafts.pop(request.request_id, None)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_pending_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        self._epochs[request.request_id] += 1
        self._counters.preemptions += 1
        self._waiting.put_back(request)

    def _schedule_waiting(self, draft: _Draft) -> None:
        context = self.context
        while len(self._waiting) and draft.tokens_left > 0 and len(self._running) < context.max_num_seqs:
            request = self._waiting.peek()
            hit = None
            if not request.spec.sampling.skip_reading_prefix_cache:
                hit = self._kv.find_hit(request)
            num_hit = hit.num_tokens if hit else 0
            count = request.num_known_tokens - num_hit
            if context.long_prefill_token_threshold and len(self._requests) > 1:
                count = min(count, context.long_prefill_token_threshold)
            if count > draft.tokens_left:
                if not context.is_chunked_prefill:
                    return
                count = draft.tokens_left
            if not self._has_room(request, hit):
                return
            blocks = self._kv.allocate(request, count, hit=hit if num_hit else None)
            if blocks is None:
                return
            self._waiting.pop()
            self._admit(request, blocks, num_hit, draft)
            self._count(draft, request, count)

    def _has_room(self, request: Request, hit: CacheHit | None) -> bool:
        """Whether the whole prompt fits now, so that a request is not admitted only to be preempted halfway."""
        if not self.context.reserve_full_prompt or not self._running:
            return True
        groups = self.context.cache.groups
        needed = blocks_for_one_request(groups, request.num_known_tokens, self.context.max_num_batched_tokens)
        shared = sum(len(blocks) for blocks in hit.block_ids) if hit else 0
        return needed - shared <= self._kv.num_free_blocks

    def _admit(self, request: Request, blocks: list[list[int]], num_hit: int, draft: _Draft) -> None:
        request.num_computed_tokens = num_hit
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = min(num_hit, request.num_prompt_tokens)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time_s is None:
            request.first_scheduled_time_s = time.time()
            self._counters.prompt_tokens += request.num_prompt_tokens
        self._running.append(request)
        self._announced.add(request.request_id)
        spec = request.spec
        draft.new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_hit,
                block_ids=blocks,
                sampling=spec.sampling,
                seed=request.seed,
                end_token_ids=[*spec.eos_token_ids, *spec.sampling.stop_token_ids],
                bad_words_token_ids=spec.bad_words_token_ids,
                adapter=spec.adapter,
            )
        )

    def _count(self, draft: _Draft, request: Request, count: int) -> None:
        draft.counts[request.request_id] = count
        draft.tokens_left -= count
        known = request.num_known_tokens + request.num_pending_tokens
        num_drafts = request.num_computed_tokens + count - known
        if num_drafts > 0:
            draft.drafts[request.request_id] = request.draft_token_ids[:num_drafts]
        request.draft_token_ids = []

    # ---- results

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """See ``Scheduler``."""
        flight = self._flights.popleft()
        if flight.plan is not plan and flight.plan.step_id != plan.step_id:
            raise ValueError(f"result of step {plan.step_id} given, but step {flight.plan.step_id} is the oldest")
        deltas = []
        for request_id, (epoch, num_computed, samples) in flight.rows.items():
            request = self._requests.get(request_id)
            if request is None or self._epochs[request_id] != epoch:
                continue
            if request_id in result.failed:
                deltas.append(self._end(request, FinishReason.ERROR, error=result.failed[request_id]))
                continue
            delta = self._update_one(request, plan, result, num_computed, samples)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _update_one(
        self, request: Request, plan: StepPlan, result: StepResult, num_computed: int, samples: bool
    ) -> RequestDelta | None:
        request_id = request.request_id
        tokens = result.sampled_token_ids.get(request_id, []) if samples else []
        if samples:
            request.num_pending_tokens -= 1
        drafts = plan.draft_token_ids.get(request_id, ())
        if drafts:
            rejected = len(drafts) + 1 - len(tokens)
            self._counters.draft_tokens += len(drafts)
            self._counters.accepted_tokens += len(tokens) - 1
            num_computed -= rejected
            request.num_computed_tokens -= rejected
        reason: FinishReason | None = None
        accepted: list[int] = []
        for token_id in tokens:
            request.token_ids.append(token_id)
            accepted.append(token_id)
            reason = check_stop(request, self.context.max_model_len)
            if reason is not None:
                break
        self._counters.generation_tokens += len(accepted)
        self._kv.commit(request, min(num_computed, request.num_known_tokens))
        request.draft_token_ids = list(result.draft_token_ids.get(request_id, ()))
        prompt_logprobs = result.prompt_logprobs.get(request_id)
        if not accepted and prompt_logprobs is None and reason is None:
            return None
        logprobs = result.logprobs.get(request_id)
        base = self._delta(request)
        delta = RequestDelta(
            request_id=request_id,
            new_token_ids=accepted,
            logprobs=logprobs[: len(accepted)] if logprobs else None,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=base.num_cached_tokens,
            queued_s=base.queued_s,
            num_preemptions=base.num_preemptions,
        )
        return delta if reason is None else self._end(request, reason, delta=delta)

    # ---- state

    def has_work(self) -> bool:
        """See ``Scheduler``."""
        return bool(self._requests)

    def request_ids(self) -> list[str]:
        """See ``Scheduler``."""
        return list(self._requests)

    def stats(self) -> SchedulerStats:
        """See ``Scheduler``."""
        counters = self._counters
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self._kv.usage,
            prefix_queries=getattr(self._kv, "num_queries", 0),
            prefix_hits=getattr(self._kv, "num_hits", 0),
            num_preemptions=counters.preemptions,
            num_steps=counters.steps,
            num_prompt_tokens=counters.prompt_tokens,
            num_generation_tokens=counters.generation_tokens,
            num_draft_tokens=counters.draft_tokens,
            num_accepted_tokens=counters.accepted_tokens,
        )

    def check_integrity(self) -> None:
        """See ``Scheduler``."""
        self._kv.check_integrity()
        running = {request.request_id for request in self._running}
        waiting = {request.request_id for request in self._waiting}
        assert not running & waiting, f"both running and waiting: {running & waiting}"
        assert running | waiting == set(self._requests), "a request is in no queue, or in one after its end"
        assert len(running) == len(self._running) <= self.context.max_num_seqs, "too many running requests"
        assert running == self._announced, "the runner's rows differ from the running requests"
        for request in self._requests.values():
            assert request.num_computed_tokens <= request.num_known_tokens + request.num_pending_tokens, (
                request.request_id
            )
            if request.request_id in waiting:
                assert request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"


@register_scheduler("fcfs")
class FcfsScheduler(_TokenScheduler):
    """First come, first served; the newest running request is preempted first."""


@register_scheduler("priority")
class PriorityScheduler(_TokenScheduler):
    """Lowest priority number first; the running request with the highest is preempted first."""

    def _make_queue(self) -> RequestQueue:
        return PriorityQueue()

    def _victim(self) -> Request:
        return max(self._running, key=priority_key)
