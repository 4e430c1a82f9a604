"""Schedulers with one fault each, on top of the strict twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rabbet.contracts import register_scheduler
from rabbet.contracts.scheduler import SchedulerContext, SchedulerStats
from rabbet.types.outputs import FinishReason, RequestDelta, StepResult
from rabbet.types.plan import StepPlan
from rabbet.types.request import EngineRequest, Request
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.scheduler import StrictScheduler

__all__ = ["MUTANTS"]

_TOKENS, _STARVES = "everybody_gets_its_own_tokens_and_one_end", "nobody_starves"


def _plant(cls: type, caught_by: str, story: str, claims: str | None = None) -> Mutant:
    """Register ``_SomeName`` as ``some_name``."""
    title = cls.__name__
    name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in title[1:]).strip("_")
    register_scheduler(name)(cls)
    return Mutant(name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story, claims=claims)


class _LosesAborts(StrictScheduler):
    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> list[RequestDelta]:
        lost = [request for request in self.waiting if request.request_id in request_ids]
        for request in lost:
            self.waiting.remove(request)
        return super().finish(request_ids, reason, error=error)


class _RowsStay(StrictScheduler):
    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        return plan and replace(plan, finished_request_ids=plan.finished_request_ids[:1])


class _NoLongest(StrictScheduler):
    def wanted(self, request: Request) -> int:
        self.longest = 10**9
        return super().wanted(request)


class _NewestFirst(StrictScheduler):
    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.waiting.rotate(1)


class _SecretPriority(StrictScheduler):
    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda item: item.spec.priority))


class _OverBudget(StrictScheduler):
    def admit(self, request: Request, left: int) -> int:
        return super().admit(request, self.context.max_num_batched_tokens)


class _DropsPreempted(StrictScheduler):
    def allocate(self, request: Request, count: int) -> list[list[int]] | None:
        blocks = super().allocate(request, count)
        while self.waiting and self.waiting[0].num_preemptions and self.gone[-1:] == [self.waiting[0].request_id]:
            self.waiting.popleft()
        return blocks


class _CommitsEarly(StrictScheduler):
    def admit(self, request: Request, left: int) -> int:
        count = super().admit(request, left)
        table = self.context.kv.block_ids(request.request_id)[0]
        self.context.kv.commit(request, min(len(table) * self.block_size, request.num_known_tokens))
        return count


class _EndsTwice(StrictScheduler):
    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        ended = {name for name in plan.num_scheduled_tokens if name not in self.request_ids()}
        late = [RequestDelta(request_id=name, finish_reason=FinishReason.ABORT) for name in ended]
        return [*super().update(plan, result), *late]


class _FailsAll(StrictScheduler):
    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        if result.failed:
            result = replace(
                result, failed=dict.fromkeys(plan.num_scheduled_tokens, next(iter(result.failed.values())))
            )
        return super().update(plan, result)


class _SharedQueue(StrictScheduler):
    everyone: ClassVar[list[Request]] = []

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.running = self.everyone


class _MinimumIgnored(StrictScheduler):
    def end_reason(self, request: Request, max_len: int) -> FinishReason | None:  # type: ignore[override]
        if request.token_ids[-1] in request.spec.eos_token_ids:
            return FinishReason.STOP
        return super().end_reason(request, max_len)


class _CountsPrompts(StrictScheduler):
    def stats(self) -> SchedulerStats:
        return replace(super().stats(), num_prompt_tokens=self.steps)


class _NoLimit(StrictScheduler):
    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(replace(context, max_num_queued_requests=None))


class _CachedLogprobs(StrictScheduler):
    def admit(self, request: Request, left: int) -> int:
        spec = request.spec
        request.spec = replace(
            spec, sampling=replace(spec.sampling, prompt_logprobs=None, skip_reading_prefix_cache=None)
        )
        count = super().admit(request, left)
        request.spec = spec
        return count


class _Hollow(StrictScheduler):
    pass


class _Secretive(StrictScheduler):
    pass


MUTANTS = (
    _plant(_LosesAborts, "ending_from_outside", "an abort of a waiting request is never answered"),
    _plant(_RowsStay, _TOKENS, "rows of ended requests fill the runner"),
    _plant(_NoLongest, _TOKENS, "the context and the pool are no limit"),
    _plant(_NewestFirst, _STARVES, "a stack for a queue"),
    _plant(_SecretPriority, "who_comes_first_goes_first", "has priorities that it does not claim"),
    _plant(_OverBudget, _TOKENS, "each request gets the whole step"),
    _plant(_DropsPreempted, _TOKENS, "a preempted request is forgotten"),
    _plant(_CommitsEarly, _TOKENS, "others find blocks that are not computed yet"),
    _plant(_EndsTwice, _TOKENS, "an aborted request ends again with its step"),
    _plant(_FailsAll, "a_failed_row_ends_alone", "one NaN ends the batch"),
    _plant(_SharedQueue, "two_schedulers_share_no_state", "a list as a class attribute"),
    _plant(_MinimumIgnored, "ends_mean_what_the_request_says", "min_tokens does not hold back the end token"),
    _plant(_CountsPrompts, "stats_add_up", "a counter counts something else"),
    _plant(_NoLimit, "a_full_queue_says_so", "the queue grows without end"),
    _plant(_CachedLogprobs, "prompt_logprobs_are_whole", "cached positions have no logprobs"),
    _plant(_Hollow, "plans_ahead_if_claimed", "claims too much", 'features = ["prefix_cache", "async"]'),
    _plant(_Secretive, "prefixes_are_found_if_claimed", "claims too little", "features = []"),
)
"""The zoo of schedulers."""
