"""An executor of one rank: a thread of this process runs core's model runner, step after step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rabbet.contracts import Refusal, register_executor
from rabbet.contracts.executor import Executor, ExecutorQuery, MemoryReport
from rabbet.errors import EngineDeadError
from rabbet.types.kv import KVCacheConfig, KVCacheSpec
from rabbet.types.outputs import StepResult
from rabbet.types.plan import StepPlan
from rabbet_sdk.strict import seal

__all__ = ["StrictExecutor"]


@register_executor("strict")
@seal
class StrictExecutor(Executor):
    """One thread, and no more: it keeps the steps in their order, and the runner lives in one thread from ``load`` on.

    For ranks in other processes send each ``config_bytes()``, and call ``make_runner`` with its ``rank`` there.
    """

    @classmethod
    def supports(cls, query: ExecutorQuery) -> tuple[Refusal, ...]:
        """One rank on this machine."""
        if query.world_size != 1 or query.num_nodes != 1:
            message = f"one rank only, not {query.world_size} on {query.num_nodes} machines"
            return (Refusal(code="WORLD_SIZE", message=message, fix="--tensor-parallel-size 1"),)
        return ()

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.runner = self.make_runner(config)
        self.death: EngineDeadError | None = None

    def load(self) -> dict[str, KVCacheSpec]:
        """See ``Executor``."""
        self.thread.submit(self.runner.load).result()
        return self.thread.submit(self.runner.kv_cache_specs).result()

    def profile_memory(self) -> MemoryReport:
        """See ``Executor``."""
        return self.thread.submit(self.runner.profile_memory).result()

    def initialize_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor``. What the first request would pay for is done here as well."""
        self.thread.submit(self.runner.initialize_cache, config).result()
        self.thread.submit(self.runner.warm_up).result()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """See ``Executor``."""
        future = self.thread.submit(self.runner.execute, plan)
        future.add_done_callback(self.note)
        return future

    def note(self, future: Future[StepResult]) -> None:
        """After a failed step nobody knows what the cache holds: nothing may run on it any more."""
        if error := future.exception():
            self.death = EngineDeadError(f"a step failed: {error}")

    def check_health(self) -> None:
        """See ``Executor``."""
        if self.death is not None:
            raise self.death

    def shutdown(self) -> None:
        """See ``Executor``. Steps under way end first, so that nobody waits for a result that never comes."""
        if self.thread is not None:
            self.thread.submit(self.runner.close).result()
            self.thread.shutdown(wait=True)
            self.thread = None  # type: ignore[assignment]
            self.death = EngineDeadError("the executor is shut down")
