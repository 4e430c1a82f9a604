"""Contract of a scheduler, and of the KV manager that it is given. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from rabbet.types.outputs import FinishReason, RequestDelta, StepResult

if TYPE_CHECKING:
    from rabbet.contracts.kv_connector import ConnectorScheduler
    from rabbet.types.kv import KVCacheConfig
    from rabbet.types.plan import StepPlan
    from rabbet.types.request import EngineRequest, Request

__all__ = ["ITERATION_TOKEN_BOUNDS", "CacheHit", "KVManager", "Scheduler", "SchedulerContext", "SchedulerStats"]

ITERATION_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of ``SchedulerStats.iteration_token_counts``; the last bucket is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheHit:
    """Cached blocks that cover the start of a request.

    Attributes:
        num_tokens: Tokens covered: a multiple of the hash unit and less than the request's known tokens, since the
            last one is always computed anew.
        block_ids: For each cache group, the blocks, not yet referenced.
        num_idle_blocks: How many of them no request holds: they are part of ``KVManager.num_free_blocks``, but taking
            the hit leaves them to nobody else.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    num_idle_blocks: int = 0


class KVManager(ABC):
    """Owner of the block pool and of the prefix cache.

    A block is free (maybe with cached content), or held by one or more requests. All calls come from the
    scheduler's thread.
    """

    @abstractmethod
    def find_hit(self, request: Request) -> CacheHit:
        """The longest cached prefix, valid in all groups. Changes nothing but the hit statistics."""

    @abstractmethod
    def allocate(
        self, request: Request, num_new_tokens: int, *, hit: CacheHit | None = None, num_external_tokens: int = 0
    ) -> list[list[int]] | None:
        """Blocks so that ``num_new_tokens`` more tokens can be computed.

            |-- num_computed --|-- hit --|-- external --|-- num_new --|
            blocks held before   touched   new blocks     new blocks

        Args:
            request: Its ``num_computed_tokens`` does not include the hit yet.
            num_new_tokens: Tokens to compute in this step.
            hit: From ``find_hit``, on the first allocation of a request.
            num_external_tokens: Tokens that a connector will load.

        Returns:
            For each group the ids to append to the request's table (the hit's blocks included), or None if the
            pool cannot give them, in which case nothing has changed.
        """

    @abstractmethod
    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """Blocks that are full up to ``num_computed_tokens`` may now be found by others, and blocks left of a sliding
        window are given back."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Give back all blocks of a request; last blocks become evictable first. Idempotent."""

    @abstractmethod
    def block_ids(self, request_id: str) -> list[list[int]]:
        """Copies of a request's tables, a group each: null blocks where a sliding window has moved on; empty tables if it
        holds nothing. What a KV connector is told, so that it never reads a block that has been given to another."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False (and no change) while requests hold blocks."""

    @property
    @abstractmethod
    def usage(self) -> float:
        """Share of the pool that requests hold, 0..1."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that could be given now, cached ones included."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not balance: references, free list, hash index, tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerContext:
    """What a scheduler is built from.

    Attributes:
        max_num_batched_tokens: Tokens a step.
        max_num_seqs: Running requests.
        max_model_len: Longest context.
        long_prefill_token_threshold: Cap on the tokens of one request a step; 0 is off.
        is_chunked_prefill: A prompt may be split over steps.
        is_async: Plans are made one step ahead of results.
        policy: ``fcfs`` or ``priority`` for the built-in scheduler.
        max_num_queued_requests: Requests at most that wait for a seat or for blocks; None is no limit.
        num_speculative_tokens: Most drafts a request and step.
        reserve_full_prompt: Admit a request only while its whole prompt fits into the pool.
        kv: The KV manager.
        cache: Sizes and groups.
        connector: Scheduler half of the KV connector, or None.
        kv_load_failure_policy: What a failed load of the connector does to its request: ``fail`` ends it with an error,
            ``recompute`` computes it anew.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv: KVManager
    cache: KVCacheConfig
    long_prefill_token_threshold: int = 0
    is_chunked_prefill: bool = True
    is_async: bool = True
    policy: str = "fcfs"
    max_num_queued_requests: int | None = None
    num_speculative_tokens: int = 0
    reserve_full_prompt: bool = True
    connector: ConnectorScheduler | None = None
    kv_load_failure_policy: str = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Gauges and counters (since start) for metrics and the periodic log line.

    Attributes:
        num_running: Requests in the batch.
        num_waiting: Requests that wait, for whatever reason.
        num_waiting_deferred: Those of them that wait for a KV connector; the others wait for room.
        kv_usage: Share of the KV cache that requests hold, 0..1.
        prefix_queries: Tokens looked up in the prefix cache.
        prefix_hits: Tokens found there.
        external_queries: Tokens that a KV connector was asked for.
        external_hits: Tokens that it had.
        num_preemptions: Preemptions.
        num_steps: Plans.
        num_prompt_tokens: Tokens of prompts that were taken in, cached ones included.
        num_local_cached_tokens: Those of them that the prefix cache had.
        num_external_cached_tokens: Those of them that a KV connector loaded.
        num_generation_tokens: Tokens generated.
        num_drafts: Drafts of one request and step, however long.
        num_draft_tokens: Tokens in them.
        num_accepted_tokens: Those of them that were right.
        num_accepted_at: The same by their position in a draft.
        num_iteration_tokens: Tokens of all steps.
        iteration_token_counts: Steps by their number of tokens, in buckets of ``ITERATION_TOKEN_BOUNDS``.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_waiting_deferred: int = 0
    external_queries: int = 0
    external_hits: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted_at: tuple[int, ...] = ()
    num_iteration_tokens: int = 0
    iteration_token_counts: tuple[int, ...] = ()


class Scheduler(ABC):
    """Decides which tokens are computed in each step.

    The engine's loop: ``schedule`` (None: nothing to do), execute, ``update``. With async scheduling one more
    plan may be made before the result of the last is given to ``update``; results come in the order of plans.
    Every request that was added gets exactly one delta with a finish reason.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            rabbet.errors.ClientError: If it can never be served. Nothing is kept then.
            rabbet.errors.OverloadedError: If the queue is full.
        """

    @abstractmethod
    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> list[RequestDelta]:
        """End requests from outside (abort, failure); unknown ids are ignored. Blocks in use by a step that runs are
        freed so that a later step may overwrite them only after it."""

    @abstractmethod
    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed now."""

    @abstractmethod
    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Take in the result of the oldest plan not yet updated."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether any request is unfinished."""

    @abstractmethod
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Numbers for metrics; cheap."""

    @staticmethod
    def end_reason(request: Request, max_len: int) -> FinishReason | None:
        """Why a request ends after its last known token, or None; sets ``stop_reason`` for stop ids and repetition.

        The rules are core's for every scheduler: end token, stop id, length, repetition, in this order. Below
        ``min_tokens`` only length counts.

        Args:
            request: With the new token as its last.
            max_len: Most tokens that prompt and output may have together.
        """
        found: FinishReason | None = import_module("rabbet.sched.stop").check_stop(request, max_len)
        return found

    def reset_prefix_cache(self) -> bool:
        """As ``KVManager.reset_prefix_cache``."""
        return self.context.kv.reset_prefix_cache()

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if queues, requests and the KV manager contradict each other."""
