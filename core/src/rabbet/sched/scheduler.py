"""The scheduler: token counts a request and step, no phases.

Running requests come first, then waiting ones, within the budgets of tokens, requests and blocks. A running request
that finds no block preempts the one that can wait best; a preempted request gives all blocks back and is computed
anew, which the prefix cache makes cheap.

Async scheduling: ``schedule`` counts tokens that the step before will sample (``num_pending_tokens``) as known. A
result that arrives for a request which was preempted or ended since its plan is dropped, because the request's
``epoch`` moved on. Blocks given back while a step that uses them runs may be handed out at once: the runner executes
plans strictly in order, so a later plan writes them only after that step. Transfers of a KV connector are not ordered
so; ``transfers`` keeps their blocks.

A waiting request whose prefix a running one is computing right now waits until it can be found, where that spares most of
its work: a burst of requests that share a long prefix computes it once.

Drafts come with a result and verifying them leaves the length open, so where drafts are made a request waits for its
result before its next step; async scheduling then overlaps the steps of different requests only.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum

from rabbet.contracts import register_scheduler
from rabbet.contracts.kv_connector import ExternalHit
from rabbet.contracts.scheduler import CacheHit, Scheduler, SchedulerContext, SchedulerStats
from rabbet.errors import InvalidRequestError, OverloadedError
from rabbet.kv.groups import blocks_for_one_request
from rabbet.sched.admission import check_request, longest_request, unseen_tokens
from rabbet.sched.counters import Counters
from rabbet.sched.entry import Entry, Flight, FlightRow, PlanDraft
from rabbet.sched.queue import FcfsQueue, PriorityQueue, RequestQueue, priority_key
from rabbet.sched.stop import check_stop
from rabbet.sched.transfers import Transfers
from rabbet.types.kv import NULL_BLOCK_ID
from rabbet.types.outputs import FinishReason, KVTransferResult, RequestDelta, StepResult, TokenLogprobs
from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.request import EngineRequest, Request, RequestStatus

__all__ = ["FcfsScheduler", "PriorityScheduler"]

_LOAD_FAILED = "the KV cache of this request could not be loaded from the connector"
_LOCAL = ExternalHit(num_tokens=0)
_MIN_SHARED_TOKENS = 256
"""A prefix under way must spare at least so many tokens, and half of what is left, to be worth a step's delay."""
_MAX_PASSED_OVER = 128
"""Requests that one step looks past, so that a long queue of such requests costs no time."""


class _Turn(Enum):
    """What came of the attempt to admit a request."""

    TAKEN = "taken"
    """It runs, or waits for a load."""
    BLOCKED = "blocked"
    """It does not fit now, and nobody overtakes it."""
    LATER = "later"
    """The connector cannot say yet, or its prefix is under way; others may go first."""


class _TokenScheduler(Scheduler):
    """What both policies share."""

    def __init__(self, context: SchedulerContext) -> None:
        """See ``Scheduler``."""
        super().__init__(context)
        self._kv = context.kv
        self._groups = context.cache.groups
        self._block_size = self._groups[0].spec.block_size if self._groups else 1
        self._max_len = longest_request(context)
        self._waiting: RequestQueue = self._make_queue()
        self._running: list[Entry] = []
        self._entries: dict[str, Entry] = {}
        self._transfers = Transfers(context.connector, context.kv)
        self._flights: deque[Flight] = deque()
        self._gone: list[str] = []
        self._counters = Counters()
        self._num_passed_over = 0
        self._is_short = False
        self._prefills: dict[bytes, int] = {}
        self._random = random.Random()
        self._next_step = 1

    def _make_queue(self) -> RequestQueue:
        return FcfsQueue()

    def _victim(self) -> int:
        """Index of the running request that can wait best."""
        return len(self._running) - 1

    # ---- requests come and go

    def add(self, request: EngineRequest) -> None:
        """See ``Scheduler``."""
        limit = self.context.max_num_queued_requests
        # What has a seat with the next step does not wait.
        num_free = 0 if self._is_short else max(0, self.context.max_num_seqs - len(self._running))
        num_waiting = len(self._waiting) - num_free
        if limit is not None and num_waiting >= limit:
            raise OverloadedError(f"{num_waiting} requests wait already, the limit is {limit}; try again later")
        if request.request_id in self._entries or self._transfers.holds(request.request_id):
            raise InvalidRequestError(f"the request id {request.request_id} is in use", field="request_id")
        check_request(request, self.context, self._max_len)
        sampling = request.sampling
        state = Request(
            spec=request,
            token_ids=list(request.prompt_token_ids),
            seed=self._random.getrandbits(63) if sampling.seed is None else sampling.seed,
        )
        # Positions that come from a cache have no logits, so prompt logprobs forbid every hit.
        skips_caches = bool(sampling.skip_reading_prefix_cache) or sampling.prompt_logprobs is not None
        self._entries[request.request_id] = Entry(state, skips_caches=skips_caches, is_local_only=skips_caches)
        self._waiting.add(state)

    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> list[RequestDelta]:
        """See ``Scheduler``."""
        entries = [self._entries[item] for item in dict.fromkeys(request_ids) if item in self._entries]
        return [self._end(entry, reason, error=error) for entry in entries]

    def _end(
        self,
        entry: Entry,
        reason: FinishReason,
        *,
        error: str | None = None,
        tokens: Sequence[int] = (),
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> RequestDelta:
        """Remove a request and make its last delta."""
        request = entry.request
        if request.status is RequestStatus.RUNNING:
            self._running.remove(entry)
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KV:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._leave_row(entry)
        del self._entries[request.request_id]
        return RequestDelta(
            request_id=request.request_id,
            new_token_ids=list(tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            error=error,
            num_cached_tokens=request.num_cached_tokens,
            queued_s=self._queued_s(entry),
            num_preemptions=request.num_preemptions,
            kv_transfer_params=self._transfers.release(request),
        )

    def _leave_row(self, entry: Entry) -> None:
        """Drop results under way, and tell the runner, with the next plan, that the row is free."""
        entry.epoch += 1
        self._end_prefill(entry)
        if entry.has_row:
            entry.has_row = False
            self._gone.append(entry.request.request_id)

    def _queued_s(self, entry: Entry) -> float | None:
        """Seconds before the first step, for the first delta only."""
        first = entry.request.first_scheduled_time_s
        if entry.has_reported or first is None:
            return None
        entry.has_reported = True
        return max(0.0, first - entry.request.spec.arrival_time_s)

    # ---- planning

    def schedule(self) -> StepPlan | None:
        """See ``Scheduler``. A plan without tokens lets a KV connector report while nothing else runs."""
        draft = PlanDraft(tokens_left=self.context.max_num_batched_tokens)
        self._schedule_running(draft)
        self._is_short = draft.has_preempted
        if not draft.has_preempted:
            self._schedule_waiting(draft)
        if not draft.counts and (self._flights or not self._transfers.is_busy):
            return None
        # A preempted request that comes back in this plan is both gone and new: the runner frees rows first.
        gone, self._gone = self._gone, []
        plan = StepPlan(
            step_id=self._next_step,
            new_requests=draft.new,
            running_requests=list(draft.running.values()),
            num_scheduled_tokens=draft.counts,
            draft_token_ids=draft.drafts,
            finished_request_ids=gone,
            kv_transfer=self._transfers.message(draft.counts),
        )
        self._next_step += 1
        self._counters.count_step(plan.num_tokens)
        self._flights.append(Flight(plan, self._depart(draft)))
        return plan

    def _depart(self, draft: PlanDraft) -> list[FlightRow]:
        """Count the tokens of a plan as computed, and those that it samples as pending."""
        rows = []
        for request_id, count in draft.counts.items():
            entry = self._entries[request_id]
            request = entry.request
            start = request.num_computed_tokens
            request.num_computed_tokens = end = start + count
            known = request.num_known_tokens + request.num_pending_tokens
            samples = end >= known
            if samples:
                request.num_pending_tokens += 1
            rows.append(FlightRow(entry, entry.epoch, start, count, samples))
        return rows

    def _schedule_running(self, draft: PlanDraft) -> None:
        index = 0
        while index < len(self._running) and draft.tokens_left > 0:
            entry = self._running[index]
            request = entry.request
            count = self._tokens_wanted(entry, draft.tokens_left)
            if count == 0:
                index += 1
                continue
            blocks = self._kv.allocate(request, count)
            if blocks is None:
                # Whoever makes room may stand before this request, or be it; then try again at what is its place now.
                index -= self._preempt(self._victim(), draft) < index
                continue
            draft.running[request.request_id] = RunningRequest(
                request_id=request.request_id, num_computed_tokens=request.num_computed_tokens, new_block_ids=blocks
            )
            draft.count(request, count)
            index += 1

    def _tokens_wanted(self, entry: Entry, tokens_left: int) -> int:
        """Tokens of this step for one running request; 0 if it waits for a result that ends it or says how long it is."""
        request = entry.request
        if request.num_pending_tokens and self.context.num_speculative_tokens:
            return 0
        known = request.num_known_tokens + request.num_pending_tokens
        output = known - request.num_prompt_tokens
        num_left = min(request.spec.max_tokens - output, self._max_len - known)
        if num_left <= 0:
            return 0
        if len(request.draft_token_ids) >= num_left:
            # The last token of a request is sampled, not accepted, so that no draft lies past the limits.
            del request.draft_token_ids[num_left - 1 :]
        count = known + len(request.draft_token_ids) - request.num_computed_tokens
        return min(self._capped(count), tokens_left)

    def _capped(self, count: int) -> int:
        """At most ``long_prefill_token_threshold`` tokens, unless a request is alone."""
        threshold = self.context.long_prefill_token_threshold
        if threshold and count > threshold and self.context.is_chunked_prefill and len(self._entries) > 1:
            return threshold
        return count

    def _preempt(self, index: int, draft: PlanDraft) -> int:
        """Give a running request's blocks back and queue it again; takes it out of the plan being made."""
        entry = self._running.pop(index)
        draft.has_preempted = True
        draft.drop(entry.request.request_id)
        entry.request.num_preemptions += 1
        self._counters.preemptions += 1
        self._start_over(entry)
        return index

    def _start_over(self, entry: Entry) -> None:
        """Put a request that is in no queue back, with nothing computed."""
        request = entry.request
        self._kv.release(request)
        self._leave_row(entry)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_pending_tokens = 0
        request.draft_token_ids = []
        entry.num_loaded_tokens = 0
        self._waiting.put_back(request)

    # ---- admission

    def _schedule_waiting(self, draft: PlanDraft) -> None:
        passed_over = []
        while len(self._waiting) and draft.tokens_left > 0 and len(self._running) < self.context.max_num_seqs:
            request = self._waiting.peek()
            turn = self._admit(self._entries[request.request_id], draft)
            if turn is _Turn.LATER:
                self._waiting.remove(request)
                passed_over.append(request)
                if len(passed_over) >= _MAX_PASSED_OVER:
                    break
            elif turn is _Turn.BLOCKED and (self._running or not self._give_up_load(request)):
                self._is_short = True
                break
        self._num_passed_over = len(passed_over)
        for request in reversed(passed_over):
            self._waiting.put_back(request)

    def _admit(self, entry: Entry, draft: PlanDraft) -> _Turn:
        """Try to let the head of the queue run, or load."""
        request = entry.request
        hit, external = None, _LOCAL
        if not entry.num_loaded_tokens:
            if not entry.skips_caches:
                hit = self._kv.find_hit(request)
                if self._is_prefix_under_way(request, hit.num_tokens):
                    return _Turn.LATER
            external = self._transfers.find_hit(entry, hit.num_tokens if hit else 0, self._block_size)
        if external.num_tokens is None:
            return _Turn.LATER
        start = request.num_computed_tokens + (hit.num_tokens if hit else 0) + external.num_tokens
        is_loading = external.is_async and external.num_tokens > 0
        count = 0 if is_loading else self._first_tokens(request, start, draft.tokens_left)
        if not (count or is_loading) or not self._has_room(request, hit, is_loading):
            return _Turn.BLOCKED
        blocks = self._kv.allocate(request, count, hit=hit, num_external_tokens=external.num_tokens)
        if blocks is None:
            return _Turn.BLOCKED
        if external.num_tokens and not self._transfers.announce(entry, external.num_tokens):
            self._kv.release(request)
            return _Turn.LATER
        self._waiting.remove(request)
        if not entry.num_loaded_tokens and not entry.is_local_only and self.context.connector is not None:
            self._counters.external_queries += request.num_known_tokens - (hit.num_tokens if hit else 0)
            self._counters.external_hits += external.num_tokens
            entry.num_external_tokens = external.num_tokens
        if request.num_preemptions == 0 and request.num_output_tokens == 0:
            request.num_cached_tokens = min(start, request.num_prompt_tokens)
        if is_loading:
            self._transfers.wait_for(entry, start)
        else:
            self._run(entry, draft, start, count)
        return _Turn.TAKEN

    def _is_prefix_under_way(self, request: Request, num_cached: int) -> bool:
        """Whether a running request is computing most of what this one lacks. A block's hash stands for all before it."""
        if not self._prefills:
            return False
        start = num_cached // self._block_size
        num_left = (request.num_known_tokens - 1) // self._block_size - start
        last = start + max(-(-num_left // 2), -(-_MIN_SHARED_TOKENS // self._block_size)) - 1
        return last < len(request.block_hashes) and request.block_hashes[last] in self._prefills

    def _begin_prefill(self, entry: Entry, start: int) -> None:
        """Blocks of the request's known tokens are under way until all of them are computed, or it stops running."""
        entry.prefill_end = entry.request.num_known_tokens
        entry.prefill_hashes = entry.request.block_hashes[start // self._block_size :]
        for value in entry.prefill_hashes:
            self._prefills[value] = self._prefills.get(value, 0) + 1

    def _end_prefill(self, entry: Entry) -> None:
        for value in entry.prefill_hashes:
            self._prefills[value] -= 1
            if not self._prefills[value]:
                del self._prefills[value]
        entry.prefill_hashes = []

    def _first_tokens(self, request: Request, start: int, tokens_left: int) -> int:
        """Tokens of a request's first step; 0 if it must wait for a step with more room."""
        count = self._capped(request.num_known_tokens - start)
        if count <= tokens_left or self.context.is_chunked_prefill:
            return min(count, tokens_left)
        # Without chunked prefill a request that was preempted may have outgrown every step: it alone is split.
        return tokens_left if count > self.context.max_num_batched_tokens else 0

    def _has_room(self, request: Request, hit: CacheHit | None, is_loading: bool) -> bool:
        """Whether the whole request fits now, so that it is not admitted only to be preempted halfway."""
        if not self._kv.usage or (not self.context.reserve_full_prompt if self._running else is_loading):
            return True
        # Where nothing runs, waiting requests that have loaded may still hold blocks: without the check the head would be
        # admitted and preempted for ever, and nobody would take those blocks from them.
        # The next token counts too: async scheduling drops the one under way when it preempts, so a request that comes
        # back where its known tokens just fit would be preempted at once, without having got any further.
        num_tokens = request.num_known_tokens + 1
        needed = blocks_for_one_request(self._groups, num_tokens, unseen_tokens(self.context))
        tables: Sequence[Sequence[int]] = hit.block_ids if hit else self._kv.block_ids(request.request_id)
        covered = sum(1 for blocks in tables for block in blocks if block != NULL_BLOCK_ID)
        num_idle = hit.num_idle_blocks if hit else 0
        return needed - covered <= self._kv.num_free_blocks - num_idle

    def _give_up_load(self, head: Request) -> bool:
        """Nothing runs and the head does not fit: take the blocks of a waiting request that has loaded, the last first."""
        loaded = [item for item in self._waiting if self._entries[item.request_id].num_loaded_tokens]
        if not loaded:
            return False
        victim = next((item for item in reversed(loaded) if item is not head), head)
        self._waiting.remove(victim)
        self._start_over(self._entries[victim.request_id])
        return True

    def _run(self, entry: Entry, draft: PlanDraft, start: int, count: int) -> None:
        request, spec = entry.request, entry.request.spec
        request.num_computed_tokens = start
        request.status = RequestStatus.RUNNING
        entry.num_loaded_tokens = 0
        entry.has_row = True
        if request.first_scheduled_time_s is None:
            request.first_scheduled_time_s = time.time()
            num_external = entry.num_external_tokens
            self._counters.count_prompt(request.num_prompt_tokens, request.num_cached_tokens, num_external)
        self._running.append(entry)
        self._begin_prefill(entry, start)
        draft.new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=start,
                block_ids=self._kv.block_ids(request.request_id),
                sampling=spec.sampling,
                seed=request.seed,
                end_token_ids=[*spec.eos_token_ids, *spec.sampling.stop_token_ids],
                bad_words_token_ids=spec.bad_words_token_ids,
                adapter=spec.adapter,
            )
        )
        draft.count(request, count)

    # ---- results

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """See ``Scheduler``.

        Raises:
            ValueError: If the plan is not the oldest one under way; nothing has changed then.
        """
        if not self._flights or self._flights[0].plan.step_id != plan.step_id:
            oldest = self._flights[0].plan.step_id if self._flights else "none"
            raise ValueError(f"result of step {plan.step_id} given, but the oldest step under way is {oldest}")
        flight = self._flights.popleft()
        deltas = [] if result.kv_transfer is None else self._take_transfer(flight, result.kv_transfer)
        for row in flight.rows:
            if row.is_stale:
                continue
            error = result.failed.get(row.entry.request.request_id)
            if error is not None:
                deltas.append(self._end(row.entry, FinishReason.ERROR, error=error))
            elif (delta := self._take_row(row, flight.plan, result)) is not None:
                deltas.append(delta)
        return deltas

    def _take_transfer(self, flight: Flight, report: KVTransferResult) -> list[RequestDelta]:
        """Requests whose load is over run next; those whose load failed end, or are computed here."""
        failed = [
            row.entry
            for row in flight.rows
            if not row.is_stale and any(report.failed_block_ids.get(row.entry.request.request_id, ()))
        ]
        for entry in self._transfers.take(report):
            if entry.has_failed_load:
                failed.append(entry)
            else:
                entry.request.status = RequestStatus.WAITING
                entry.request.num_computed_tokens = entry.num_loaded_tokens
                self._waiting.put_back(entry.request)
        return [delta for entry in failed if (delta := self._fail_load(entry)) is not None]

    def _fail_load(self, entry: Entry) -> RequestDelta | None:
        entry.is_local_only = True
        entry.request.num_cached_tokens = 0
        if entry.request.status is RequestStatus.RUNNING:
            self._running.remove(entry)
        self._start_over(entry)
        if self.context.kv_load_failure_policy == "recompute":
            return None
        return self._end(entry, FinishReason.ERROR, error=_LOAD_FAILED)

    def _take_row(self, row: FlightRow, plan: StepPlan, result: StepResult) -> RequestDelta | None:
        entry, request = row.entry, row.entry.request
        request_id = request.request_id
        tokens: Sequence[int] = ()
        num_computed = row.start + row.count
        if row.samples:
            request.num_pending_tokens -= 1
            tokens = result.sampled_token_ids.get(request_id, ())
            num_drafts = len(plan.draft_token_ids.get(request_id, ()))
            if not 1 <= len(tokens) <= num_drafts + 1:
                error = f"the model runner gave {len(tokens)} tokens where 1 to {num_drafts + 1} were due"
                return self._end(entry, FinishReason.ERROR, error=error)
            if num_drafts:
                num_computed -= self._rewind(request, num_drafts, len(tokens) - 1)
        accepted, reason = self._append(request, tokens)
        self._kv.commit(request, min(num_computed, request.num_known_tokens))
        if entry.prefill_hashes and num_computed >= entry.prefill_end:
            self._end_prefill(entry)
        drafts = result.draft_token_ids.get(request_id)
        request.draft_token_ids = list(drafts[: self.context.num_speculative_tokens]) if drafts else []
        logprobs = result.logprobs.get(request_id)
        if logprobs is not None:
            logprobs = logprobs[: len(accepted)]
        prompt_logprobs = self._fresh_prompt_logprobs(row, result.prompt_logprobs.get(request_id))
        if reason is not None:
            return self._end(entry, reason, tokens=accepted, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        if not accepted and not prompt_logprobs:
            return None
        return RequestDelta(
            request_id=request_id,
            new_token_ids=accepted,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            queued_s=self._queued_s(entry),
            num_preemptions=request.num_preemptions,
        )

    def _rewind(self, request: Request, num_drafts: int, num_accepted: int) -> int:
        """Uncount the drafts that were not accepted; later tokens overwrite their KV. Returns how many."""
        self._counters.count_drafts(num_drafts, num_accepted)
        request.num_computed_tokens -= num_drafts - num_accepted
        return num_drafts - num_accepted

    def _append(self, request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Make tokens known, up to the one that ends the request."""
        accepted: list[int] = []
        reason = None
        for token_id in tokens:
            request.token_ids.append(token_id)
            accepted.append(token_id)
            reason = check_stop(request, self._max_len)
            if reason is not None:
                break
        self._counters.generation_tokens += len(accepted)
        return accepted, reason

    @staticmethod
    def _fresh_prompt_logprobs(row: FlightRow, logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
        """Entries of positions that were not reported before a preemption; entry i is of position start + 1 + i."""
        if not logprobs:
            return None
        entry = row.entry
        fresh = logprobs[max(0, entry.num_prompt_logprobs - row.start) :]
        entry.num_prompt_logprobs = max(entry.num_prompt_logprobs, row.start + len(logprobs))
        return fresh or None

    # ---- state

    def has_work(self) -> bool:
        """See ``Scheduler``. True as well while a KV connector uses blocks of requests that have ended."""
        return bool(self._entries) or self._transfers.is_busy

    def request_ids(self) -> list[str]:
        """See ``Scheduler``."""
        return list(self._entries)

    def stats(self) -> SchedulerStats:
        """See ``Scheduler``."""
        counters = self._counters
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + self._transfers.num_loading,
            kv_usage=self._kv.usage,
            prefix_queries=getattr(self._kv, "num_queries", 0),
            prefix_hits=getattr(self._kv, "num_hits", 0),
            num_preemptions=counters.preemptions,
            num_steps=counters.steps,
            num_prompt_tokens=counters.prompt_tokens,
            num_generation_tokens=counters.generation_tokens,
            num_draft_tokens=counters.draft_tokens,
            num_accepted_tokens=counters.accepted_tokens,
            num_waiting_deferred=self._transfers.num_loading + min(self._num_passed_over, len(self._waiting)),
            external_queries=counters.external_queries,
            external_hits=counters.external_hits,
            num_local_cached_tokens=counters.local_cached_tokens,
            num_external_cached_tokens=counters.external_cached_tokens,
            num_drafts=counters.drafts,
            num_accepted_at=tuple(counters.accepted_at),
            num_iteration_tokens=counters.iteration_tokens,
            iteration_token_counts=tuple(counters.iteration_counts),
        )

    def check_integrity(self) -> None:
        """See ``Scheduler``."""
        self._kv.check_integrity()
        queues = [
            [entry.request.request_id for entry in self._running],
            [request.request_id for request in self._waiting],
            sorted(self._transfers.loading_ids()),
        ]
        everyone = [request_id for queue in queues for request_id in queue]
        assert len(everyone) == len(set(everyone)), "a request is queued twice"
        assert set(everyone) == set(self._entries), "a request is in no queue, or in one after its end"
        assert len(self._running) <= self.context.max_num_seqs, "too many running requests"
        assert len(self._waiting) == len(queues[1]), "the queue's length is wrong"
        for request_id, entry in self._entries.items():
            self._check_entry(entry, is_running=request_id in queues[0])
        under_way = Counter(value for entry in self._running for value in entry.prefill_hashes)
        assert under_way == self._prefills, "prefixes are under way that nobody computes"

    def _check_entry(self, entry: Entry, *, is_running: bool) -> None:
        request = entry.request
        name = request.request_id
        pending = sum(
            row.samples for flight in self._flights for row in flight.rows if row.entry is entry and not row.is_stale
        )
        assert request.num_pending_tokens == pending, (
            f"{name} counts {request.num_pending_tokens} pending tokens, not {pending}"
        )
        assert entry.has_row == is_running == (request.status is RequestStatus.RUNNING), f"{name} is {request.status}"
        assert not request.is_finished, f"{name} has ended"
        if is_running:
            known = request.num_known_tokens + request.num_pending_tokens
            assert request.num_computed_tokens <= known + self.context.num_speculative_tokens, f"{name} is past its end"
            return
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KV:
            assert request.num_computed_tokens == entry.num_loaded_tokens, f"{name} waits with computed tokens"
        if not entry.num_loaded_tokens:
            assert not any(self._kv.block_ids(name)), f"{name} waits with blocks"


@register_scheduler("fcfs")
class FcfsScheduler(_TokenScheduler):
    """First come, first served; the newest running request is preempted first."""


@register_scheduler("priority")
class PriorityScheduler(_TokenScheduler):
    """Lowest priority number first; the running request with the highest is preempted first."""

    def _make_queue(self) -> RequestQueue:
        return PriorityQueue()

    def _victim(self) -> int:
        running = self._running
        return max(range(len(running)), key=lambda index: priority_key(running[index].request))
