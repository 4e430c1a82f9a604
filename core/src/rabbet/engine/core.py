"""The engine: scheduler, KV manager and executor, and the step of three calls that drives them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from rabbet.config.resolved import ResolvedConfig
from rabbet.contracts.executor import Executor, MemoryReport
from rabbet.contracts.scheduler import Scheduler, SchedulerContext, SchedulerStats
from rabbet.engine.ledger import Ledger
from rabbet.engine.messages import EngineInfo
from rabbet.engine.sizing import fit_context, report_capacity
from rabbet.errors import ClientError, ConfigError, EngineDeadError, OverloadedError
from rabbet.kv.groups import build_cache_config, capacity_tokens, max_concurrency
from rabbet.kv.manager import BlockKVManager
from rabbet.registry import Composition
from rabbet.types.kv import KVCacheConfig
from rabbet.types.outputs import FinishReason, RequestDelta, StepResult
from rabbet.types.plan import StepPlan
from rabbet.types.request import EngineRequest

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)
_MAX_VAIN_FAILURES = 8


class EngineCore:
    """One engine. Every method is called from one thread, the engine's loop.

    What goes wrong for one request ends that request; what goes wrong in a step ends the requests of that step; the
    engine goes on, so that no client can end it by sending what fails. It gives up (``EngineDeadError``) when the
    executor is gone, when planning fails again and again with no request to blame, or when a plugin raises SystemExit.
    """

    def __init__(self, resolved: ResolvedConfig, *, on_phase: Callable[[str], None] | None = None) -> None:
        """Load the model and divide the memory.

        Args:
            resolved: What to run.
            on_phase: Told the name of each phase of the start.

        Raises:
            ConfigError: If the KV cache cannot hold one request; the message says what would fit.
        """
        phase = on_phase or (lambda _name: None)
        self._executor: Executor = resolved.composition.build("executor", resolved)
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
            self._depth = _depth(self._executor, resolved)
            self.scheduler = self._make_scheduler(cache)
            self.resolved = replace(self.resolved, composition=self._settled())
        except BaseException:
            self._executor.shutdown()
            raise
        self._ledger = Ledger()
        self._flights: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._vain_failures = 0
        self.info = _info(self.resolved, cache, report)
        report_capacity(self.info, report)

    def _settled(self) -> Composition:
        """The composition with everything that was done to core until now, by whichever process."""
        resolved = self.resolved
        return resolved.composition.settled(is_strict=resolved.config.plugins.strict, more=self._executor.evidence())

    def _make_scheduler(self, cache: KVCacheConfig) -> Scheduler:
        resolved, settings = self.resolved, self.resolved.config.scheduler
        return resolved.composition.build(  # type: ignore[no-any-return]
            "scheduler",
            SchedulerContext(
                max_num_batched_tokens=resolved.max_num_batched_tokens,
                max_num_seqs=resolved.max_num_seqs,
                max_model_len=resolved.max_model_len,
                long_prefill_token_threshold=settings.long_prefill_token_threshold,
                is_chunked_prefill=resolved.is_chunked_prefill,
                is_async=self._depth > 1,
                policy=settings.scheduling_policy,
                max_num_queued_requests=settings.max_num_queued_reqs,
                kv=BlockKVManager(cache, enable_prefix_caching=resolved.config.cache.enable_prefix_caching),
                cache=cache,
            ),
        )

    # ---- requests

    def add(self, request: EngineRequest) -> list[RequestDelta]:
        """Queue a request; a refusal comes back as its last delta."""
        request_id = request.request_id
        if request_id in self._ledger:
            # Its answer could not be told from that of the first; the front makes ids, so this is no client's doing.
            logger.error("a second request with the id %s is dropped", request_id)
            return []
        self._ledger.open(request_id)
        try:
            self._check_ids(request)
            self.scheduler.add(request)
        except (ClientError, OverloadedError) as error:
            return self._ledger.passing([_refusal(request_id, error)])
        except BaseException as error:  # noqa: BLE001  the edge to a scheduler plugin: this request fails alone
            return self._fail([request_id], "taking in a request", error)
        return []

    def _check_ids(self, request: EngineRequest) -> None:
        """The front has checked ids already; an index outside the vocabulary must never reach a kernel all the same."""
        vocab_size = self.resolved.vocab_size
        ids = request.prompt_token_ids
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise ClientError(f"a prompt token id lies outside 0 to {vocab_size - 1}", field="prompt")
        request.sampling.check_against_model(vocab_size=vocab_size, max_logprobs=-1)

    def abort(self, request_ids: Sequence[str]) -> list[RequestDelta]:
        """End requests that nobody waits for; unknown ids are ignored."""
        return self._end([item for item in request_ids if item in self._ledger], FinishReason.ABORT, None)

    def abort_all(self, reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> list[RequestDelta]:
        """End every request."""
        return self._end(self._ledger.ids(), reason, error)

    def _end(self, request_ids: Sequence[str], reason: FinishReason, error: str | None) -> list[RequestDelta]:
        passed = self._ledger.passing(self.scheduler.finish(request_ids, reason, error=error))
        if any(request_id in self._ledger for request_id in request_ids):
            passed += self._ledger.passing(self._ledger.end_missing(self.scheduler.request_ids(), reason, error))
        return passed

    # ---- steps

    def has_work(self) -> bool:
        """Whether a call of ``step`` would do anything."""
        return bool(self._flights) or self.scheduler.has_work()

    @property
    def is_waiting(self) -> bool:
        """Whether nothing runs: unfinished requests wait for something other than a step."""
        return not self._flights

    def step(self) -> list[RequestDelta]:
        """Plan as far ahead as is allowed, then take in the oldest result.

        Returns:
            News of requests; empty if the step produced none.

        Raises:
            EngineDeadError: If the executor is gone, or planning keeps failing.
        """
        news = self._plan_ahead()
        if self._flights:
            news += self._take_in()
        return news

    def _plan_ahead(self) -> list[RequestDelta]:
        while len(self._flights) < self._depth:
            try:
                plan = self.scheduler.schedule()
            except BaseException as error:  # noqa: BLE001  the edge to a scheduler plugin
                return self._fail(_culprits(error, self._ledger) or self._ledger.ids(), "planning a step", error)
            if plan is None:
                break
            try:
                future = self._executor.execute(plan)
            except BaseException as error:  # noqa: BLE001  the edge to an executor plugin; taken in like a failed step
                future = Future()
                future.set_exception(error)
            self._flights.append((plan, future))
        return []

    def _take_in(self) -> list[RequestDelta]:
        plan, future = self._flights.popleft()
        try:
            result = future.result()
        except EngineDeadError:
            raise
        except BaseException as error:  # noqa: BLE001  whatever a kernel or a plugin raised: the step's requests fail
            self._executor.check_health()
            _log_failure(f"running step {plan.step_id}", error)
            message = _shown(error)
            result = StepResult(step_id=plan.step_id, failed=dict.fromkeys(plan.num_scheduled_tokens, message))
        try:
            return self._ledger.passing(self.scheduler.update(plan, result))
        except BaseException as error:  # noqa: BLE001  the edge to a scheduler plugin
            culprits = _culprits(error, self._ledger) or [i for i in plan.num_scheduled_tokens if i in self._ledger]
            return self._fail(culprits, f"taking in step {plan.step_id}", error)

    def _fail(self, request_ids: Sequence[str], doing: str, error: BaseException) -> list[RequestDelta]:
        """End requests after a failure, and those whose news were lost by it."""
        _log_failure(doing, error)
        message = _shown(error)
        passed = self._end(request_ids, FinishReason.ERROR, message)
        lost = self._ledger.end_missing(self.scheduler.request_ids(), FinishReason.ERROR, message)
        passed += self._ledger.passing(lost)
        self._vain_failures = 0 if passed else self._vain_failures + 1
        if self._vain_failures >= _MAX_VAIN_FAILURES:
            raise EngineDeadError(f"{doing} fails again and again: {type(error).__name__}: {error}") from error
        return passed

    # ---- the rest

    def stats(self) -> SchedulerStats:
        """Gauges and counters."""
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while requests run."""
        return self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.scheduler.check_integrity()
        known, accepted = set(self.scheduler.request_ids()), set(self._ledger.ids())
        assert known == accepted, f"scheduler and ledger differ in {known ^ accepted}"

    def close(self) -> None:
        """Wait for what runs and free everything; idempotent."""
        while self._flights:
            self._flights.popleft()[1].cancel()
        self._executor.shutdown()


def _depth(executor: Executor, resolved: ResolvedConfig) -> int:
    """Steps under way at once. What is asked for explicitly is obeyed or refused."""
    most = executor.max_concurrent_steps
    if most < 2 and resolved.config.scheduler.async_scheduling:
        raise ConfigError(
            f"--async-scheduling is set, but the executor {resolved.composition.name('executor')} runs one step at a time; "
            "leave the option out",
            field="scheduler.async_scheduling",
        )
    return min(most, 2) if resolved.is_async else 1


def _info(resolved: ResolvedConfig, cache: KVCacheConfig, report: MemoryReport) -> EngineInfo:
    return EngineInfo(
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        num_blocks=cache.num_blocks,
        block_size=resolved.block_size,
        capacity_tokens=capacity_tokens(cache),
        max_concurrency=max_concurrency(cache, resolved.max_model_len),
        weights_bytes=report.weights_bytes,
        kv_cache_bytes=cache.size_bytes,
    )


def _refusal(request_id: str, error: ClientError | OverloadedError) -> RequestDelta:
    return RequestDelta(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind="OverloadedError" if isinstance(error, OverloadedError) else "InvalidRequestError",
    )


def _culprits(error: BaseException, ledger: Ledger) -> list[str]:
    """The request that an exception names (``ServerError.request_id``), if it is open."""
    request_id = getattr(error, "request_id", None)
    return [request_id] if isinstance(request_id, str) and request_id in ledger else []


def _log_failure(doing: str, error: BaseException) -> None:
    """Log a failure, whatever a plugin raised, a panic of compiled code among it.

    Raises:
        EngineDeadError: If a plugin wants the process to end (``sys.exit``). It does, but not without a reason: signals
            are the front's affair, so these exceptions come from code and from nothing else.
    """
    logger.error("%s failed (%s); its requests end with an error", doing, type(error).__name__, exc_info=error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        raise EngineDeadError(f"{doing}: a plugin raised {type(error).__name__}({error})") from error


def _shown(error: BaseException) -> str:
    """What the client may read: the kind of failure, none of its details."""
    return f"the engine failed while computing this request ({type(error).__name__}); see its log"
