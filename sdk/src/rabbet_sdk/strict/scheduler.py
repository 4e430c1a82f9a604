"""First come, first served, one step at a time: running requests, then waiting ones, while there are tokens and blocks.

There is no prefill and no decode: a step computes the tokens of a request that are known and not computed yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rabbet.contracts import register_scheduler
from rabbet.contracts.scheduler import Scheduler, SchedulerContext, SchedulerStats
from rabbet.errors import ConfigError, InvalidRequestError, OverloadedError
from rabbet.types.outputs import FinishReason, RequestDelta, StepResult
from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.request import EngineRequest, Request, RequestStatus
from rabbet_sdk.strict import seal

__all__ = ["StrictScheduler"]


@register_scheduler("strict")
@seal
class StrictScheduler(Scheduler):
    """``waiting`` and ``running`` hold every unfinished request, oldest first; ``flight`` the plan whose result is due."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        if context.connector is not None:
            raise ConfigError(
                "this scheduler knows no KV connectors; leave --kv-transfer-config out", field="kv_transfer"
            )
        # What the whole pool holds of one request; one that grew past it would be preempted for ever.
        blocks = (context.cache.num_blocks - 1) // max(1, len(context.cache.groups))
        self.block_size = context.cache.groups[0].spec.block_size if context.cache.groups else context.max_model_len
        self.longest = min(context.max_model_len, blocks * self.block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.flight: dict[str, Request] | None = None
        self.gone: list[str] = []
        # Numbers of a request that are told once: seconds in the queue, positions of the prompt with logprobs.
        self.queued: dict[str, float] = {}
        self.told: dict[str, int] = {}
        self.steps = self.preemptions = self.prompt_tokens = self.generated = self.queries = self.hits = 0

    def add(self, request: EngineRequest) -> None:
        """See ``Scheduler``."""
        context, count = self.context, len(request.prompt_token_ids)
        step = context.max_model_len if context.is_chunked_prefill else context.max_num_batched_tokens
        limit = context.max_num_queued_requests
        if limit is not None and len(self.waiting) >= limit + max(0, context.max_num_seqs - len(self.running)):
            raise OverloadedError(f"{len(self.waiting)} requests wait already, the limit is {limit}; try again later")
        if request.request_id in self.request_ids():
            raise InvalidRequestError(f"the request id {request.request_id} is in use", field="request_id")
        most = min(self.longest - 1, step)
        if not 1 <= count <= most:
            raise InvalidRequestError(f"the prompt has {count} tokens; 1 to {most} fit", field="prompt", value=count)
        if request.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {request.max_tokens}; at least 1", field="max_tokens")
        seed = request.sampling.seed if request.sampling.seed is not None else hash(request.request_id) & (1 << 62) - 1
        self.waiting.append(Request(spec=request, token_ids=list(request.prompt_token_ids), seed=seed))

    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> list[RequestDelta]:
        """See ``Scheduler``."""
        found = [item for item in [*self.running, *self.waiting] if item.request_id in request_ids]
        return [self.delta(request, reason=reason, error=error) for request in found]

    def schedule(self) -> StepPlan | None:
        """See ``Scheduler``. Nothing is planned before the last result is known."""
        if self.flight is not None:
            return None
        left, running, new = self.context.max_num_batched_tokens, [], []
        counts: dict[str, int] = {}
        preempted = self.preemptions
        for request in list(self.running):
            count = min(self.wanted(request), left)
            blocks = self.allocate(request, count) if count and request in self.running else None
            if blocks is not None:
                running.append(
                    RunningRequest(
                        request_id=request.request_id,
                        num_computed_tokens=request.num_computed_tokens,
                        new_block_ids=blocks,
                    )
                )
                counts[request.request_id] = count
                left -= count
        # After a preemption blocks are scarce: nobody new comes in.
        while self.waiting and left and preempted == self.preemptions and len(self.running) < self.context.max_num_seqs:
            count = self.admit(self.waiting[0], left)
            if not count:
                break
            request = self.waiting.popleft()
            self.running.append(request)
            new.append(self.row(request))
            counts[request.request_id] = count
            left -= count
        if not counts:
            return None
        self.steps += 1
        self.flight = {request.request_id: request for request in self.running if request.request_id in counts}
        gone, self.gone = self.gone, []
        return StepPlan(
            step_id=self.steps, new_requests=new, running_requests=running, num_scheduled_tokens=counts,
            finished_request_ids=gone,
        )  # fmt: skip

    def wanted(self, request: Request) -> int:
        """Tokens that are known and not computed, but no more than one request may take beside others."""
        count, most = request.num_known_tokens - request.num_computed_tokens, self.context.long_prefill_token_threshold
        is_alone = len(self.running) + len(self.waiting) == 1
        return min(count, most) if most and self.context.is_chunked_prefill and not is_alone else count

    def allocate(self, request: Request, count: int) -> list[list[int]] | None:
        """Blocks for a running request; the newest ones give theirs back until there are enough, or it is gone itself."""
        while (blocks := self.context.kv.allocate(request, count)) is None:
            victim = self.running.pop()
            self.context.kv.release(victim)
            victim.num_computed_tokens, victim.status = 0, RequestStatus.PREEMPTED
            victim.num_preemptions += 1
            self.preemptions += 1
            self.gone.append(victim.request_id)
            self.waiting.appendleft(victim)
            if victim is request:
                return None
        return blocks

    def admit(self, request: Request, left: int) -> int:
        """Give the head of the queue blocks for its first step; the number of its tokens, 0 if it must wait."""
        kv, sampling = self.context.kv, request.spec.sampling
        # Positions that come from a cache have no logits.
        hit = (
            None if sampling.skip_reading_prefix_cache or sampling.prompt_logprobs is not None else kv.find_hit(request)
        )
        start = hit.num_tokens if hit else 0
        count = self.wanted(request) - start
        if count > left and not self.context.is_chunked_prefill and count <= self.context.max_num_batched_tokens:
            return 0
        # The whole request must fit, with its next token, or it would be preempted halfway.
        idle = kv.num_free_blocks - (hit.num_idle_blocks if hit else 0)
        groups = max(1, len(self.context.cache.groups))
        needed = -(-(request.num_known_tokens + 1 - start) // self.block_size) * groups
        if self.running and self.context.reserve_full_prompt and needed > idle:
            return 0
        count = max(1, min(count, left))
        if kv.allocate(request, count, hit=hit) is None:
            return 0
        request.num_computed_tokens, request.status = start, RequestStatus.RUNNING
        if request.first_scheduled_time_s is None:
            request.first_scheduled_time_s, request.num_cached_tokens = time.time(), start
            self.queued[request.request_id] = max(0.0, time.time() - request.spec.arrival_time_s)
            self.queries, self.hits = self.queries + request.num_prompt_tokens, self.hits + start
            self.prompt_tokens += request.num_prompt_tokens
        return count

    def row(self, request: Request) -> NewRequest:
        """What the runner has to know of a request."""
        spec = request.spec
        return NewRequest(
            request_id=request.request_id, token_ids=list(request.token_ids), num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens, block_ids=self.context.kv.block_ids(request.request_id),
            sampling=spec.sampling, seed=request.seed, end_token_ids=[*spec.eos_token_ids, *spec.sampling.stop_token_ids],
            bad_words_token_ids=spec.bad_words_token_ids, adapter=spec.adapter,
        )  # fmt: skip

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """See ``Scheduler``. A request that ended since the plan gets nothing more."""
        flight, self.flight, deltas = self.flight or {}, None, []
        for name, count in plan.num_scheduled_tokens.items():
            request, error = flight[name], result.failed.get(name)
            if request.is_finished:
                continue
            if error is not None:
                deltas.append(self.delta(request, reason=FinishReason.ERROR, error=error))
                continue
            start, tokens = request.num_computed_tokens, result.sampled_token_ids.get(name, [])
            request.num_computed_tokens += count
            request.token_ids.extend(tokens)
            self.generated += len(tokens)
            self.context.kv.commit(request, request.num_computed_tokens)
            reason = self.end_reason(request, self.longest) if tokens else None
            if tokens or name in result.prompt_logprobs:
                deltas.append(self.delta(request, tokens, result, start=start, reason=reason))
        return deltas

    def delta(
        self, request: Request, tokens: Sequence[int] = (), result: StepResult | None = None, *, start: int = 0,
        reason: FinishReason | None = None, error: str | None = None,
    ) -> RequestDelta:  # fmt: skip
        """News of a request; with a reason, the last ones."""
        name, fresh = request.request_id, None
        if reason is not None:
            if request in self.running:
                self.running.remove(request)
                self.gone.append(name)
            else:
                self.waiting.remove(request)
                # Its row, if it had one, went when it was preempted.
            self.context.kv.release(request)
            request.status = RequestStatus.FINISHED
        if result is not None and name in result.prompt_logprobs:
            # What a preemption made the runner compute again has been told.
            entries, seen = result.prompt_logprobs[name], self.told.get(name, 0)
            fresh = entries[max(0, seen - start) :] or None
            self.told[name] = max(seen, start + len(entries))
        if reason is not None:
            self.told.pop(name, None)
        return RequestDelta(
            request_id=name, new_token_ids=list(tokens), logprobs=result.logprobs.get(name) if result else None,
            prompt_logprobs=fresh, finish_reason=reason, stop_reason=request.stop_reason, error=error,
            num_cached_tokens=request.num_cached_tokens, queued_s=self.queued.pop(name, None),
            num_preemptions=request.num_preemptions,
        )  # fmt: skip

    def has_work(self) -> bool:
        """See ``Scheduler``."""
        return bool(self.running or self.waiting)

    def request_ids(self) -> list[str]:
        """See ``Scheduler``."""
        return [request.request_id for request in [*self.running, *self.waiting]]

    def stats(self) -> SchedulerStats:
        """See ``Scheduler``."""
        return SchedulerStats(
            num_running=len(self.running), num_waiting=len(self.waiting), kv_usage=self.context.kv.usage,
            prefix_queries=self.queries, prefix_hits=self.hits, num_preemptions=self.preemptions, num_steps=self.steps,
            num_prompt_tokens=self.prompt_tokens, num_generation_tokens=self.generated, num_local_cached_tokens=self.hits,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """See ``Scheduler``."""
        self.context.kv.check_integrity()
        names = self.request_ids()
        assert len(names) == len(set(names)), "a request is queued twice"
        assert all(not any(self.context.kv.block_ids(item.request_id)) for item in self.waiting), (
            "a waiting one has blocks"
        )
