"""The engine: scheduler, KV manager and executor, and the loop of three calls that drives them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from rabbet.config.resolved import ResolvedConfig
from rabbet.contracts.executor import Executor
from rabbet.contracts.scheduler import Scheduler, SchedulerContext, SchedulerStats
from rabbet.engine.messages import EngineInfo
from rabbet.engine.sizing import fit_context, report_capacity
from rabbet.errors import ClientError, OverloadedError, RabbetError
from rabbet.kv.groups import build_cache_config, capacity_tokens, max_concurrency
from rabbet.kv.manager import BlockKVManager
from rabbet.types.outputs import FinishReason, RequestDelta, StepResult
from rabbet.types.plan import StepPlan
from rabbet.types.request import EngineRequest

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)


class EngineCore:
    """One engine. Every method is called from one thread, the engine's loop."""

    def __init__(self, resolved: ResolvedConfig, *, on_phase: Callable[[str], None] | None = None) -> None:
        """Load the model and divide the memory.

        Args:
            resolved: What to run.
            on_phase: Told the name of each phase of the start.

        Raises:
            ConfigError: If the KV cache cannot hold one request; the message says what would fit.
        """
        phase = on_phase or (lambda _name: None)
        self._executor: Executor = resolved.composition.load("executor")(resolved)
        try:
            phase("loading the model")
            specs = self._executor.load()
            phase("measuring memory")
            report = self._executor.profile_memory()
            cache = build_cache_config(specs, report.available_kv_bytes, resolved.config.cache.num_gpu_blocks_override)
            length = fit_context(resolved, specs, cache.num_blocks, report)
            self.resolved = replace(resolved, max_model_len=length)
            phase("allocating the KV cache and warming up")
            self._executor.initialize_cache(cache)
        except BaseException:
            self._executor.shutdown()
            raise
        kv = BlockKVManager(cache, enable_prefix_caching=resolved.config.cache.enable_prefix_caching)
        scheduler_class: type[Scheduler] = resolved.composition.load("scheduler")
        settings = resolved.config.scheduler
        self._depth = min(self._executor.max_concurrent_steps, 2) if resolved.is_async else 1
        self.scheduler = scheduler_class(
            SchedulerContext(
                max_num_batched_tokens=resolved.max_num_batched_tokens,
                max_num_seqs=resolved.max_num_seqs,
                max_model_len=length,
                long_prefill_token_threshold=settings.long_prefill_token_threshold,
                is_chunked_prefill=resolved.is_chunked_prefill,
                is_async=self._depth > 1,
                policy=settings.scheduling_policy,
                max_num_queued_requests=settings.max_num_queued_reqs,
                kv=kv,
                cache=cache,
            )
        )
        self._flights: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self.step_started_s: float | None = None
        self.info = EngineInfo(
            max_model_len=length,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            num_blocks=cache.num_blocks,
            block_size=resolved.block_size,
            capacity_tokens=capacity_tokens(cache),
            max_concurrency=max_concurrency(cache, length),
            weights_bytes=report.weights_bytes,
            kv_cache_bytes=cache.size_bytes,
        )
        report_capacity(self.info, report)

    # ---- requests

    def add(self, request: EngineRequest) -> RequestDelta | None:
        """Queue a request; a refusal comes back as its last delta."""
        try:
            self._check_ids(request)
            self.scheduler.add(request)
        except (ClientError, OverloadedError) as error:
            return RequestDelta(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=str(error))
        return None

    def _check_ids(self, request: EngineRequest) -> None:
        """The front has checked ids already; an index outside the vocabulary must never reach a kernel all the same."""
        vocab_size = self.resolved.vocab_size
        ids = request.prompt_token_ids
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise ClientError(f"a prompt token id lies outside 0 to {vocab_size - 1}", field="prompt")
        request.sampling.check_against_model(vocab_size=vocab_size, max_logprobs=-1)

    def abort(self, request_ids: Sequence[str]) -> list[RequestDelta]:
        """End requests that nobody waits for; unknown ids are ignored."""
        return self.scheduler.finish(request_ids, FinishReason.ABORT)

    def abort_all(self, reason: FinishReason, error: str | None = None) -> list[RequestDelta]:
        """End every request."""
        return self.scheduler.finish(self.scheduler.request_ids(), reason, error=error)

    # ---- steps

    def has_work(self) -> bool:
        """Whether a call of ``step`` would do anything."""
        return bool(self._flights) or self.scheduler.has_work()

    def step(self) -> list[RequestDelta]:
        """Plan as far ahead as is allowed, then take in the oldest result.

        Returns:
            News of requests; empty if the step produced none.

        Raises:
            EngineDeadError: If the executor is gone.
        """
        while len(self._flights) < self._depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            if not self._flights:
                self.step_started_s = time.monotonic()
            self._flights.append((plan, self._executor.execute(plan)))
        if not self._flights:
            return []
        plan, future = self._flights.popleft()
        try:
            result = future.result()
        except RabbetError:
            self._executor.check_health()
            raise
        except Exception as error:  # whatever a kernel or a plugin raised: the step's requests fail, the engine goes on
            self._executor.check_health()
            result = self._failed_step(plan, error)
        self.step_started_s = time.monotonic() if self._flights else None
        return self.scheduler.update(plan, result)

    def _failed_step(self, plan: StepPlan, error: Exception) -> StepResult:
        logger.exception("step %d failed; its %d requests end", plan.step_id, len(plan.num_scheduled_tokens))
        message = f"the engine failed while computing this request ({type(error).__name__}); see its log"
        return StepResult(step_id=plan.step_id, failed=dict.fromkeys(plan.num_scheduled_tokens, message))

    def stats(self) -> SchedulerStats:
        """Gauges and counters."""
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while requests run."""
        return self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Wait for what runs and free everything; idempotent."""
        while self._flights:
            self._flights.popleft()[1].cancel()
        self._executor.shutdown()
