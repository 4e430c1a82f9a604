"""The executor for one rank: the runner lives in a thread of this process, and steps run there in order."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rabbet.contracts import Refusal, register_executor
from rabbet.contracts.executor import Executor, ExecutorQuery, MemoryReport
from rabbet.errors import EngineDeadError
from rabbet.runner.runner import DeviceRunner
from rabbet.types.kv import KVCacheConfig, KVCacheSpec
from rabbet.types.outputs import StepResult
from rabbet.types.plan import StepPlan

__all__ = ["UniExecutor"]


@register_executor("uni")
class UniExecutor(Executor):
    """One rank in this process.

    Everything that touches the device runs in one thread: kernels keep their own threads by the thread that calls
    them, and while a step runs the scheduler plans the next one.
    """

    @classmethod
    def supports(cls, query: ExecutorQuery) -> tuple[Refusal, ...]:
        """One rank only."""
        if query.world_size != 1:
            message = f"one rank only, not {query.world_size}"
            return (Refusal(code="WORLD_SIZE", message=message, fix="--distributed-executor-backend mp"),)
        return ()

    def __init__(self, config: Any) -> None:
        """See ``Executor``."""
        super().__init__(config)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rabbet-runner")
        self._runner = DeviceRunner(config)
        self._is_closed = False

    def load(self) -> dict[str, KVCacheSpec]:
        """See ``Executor``."""
        self._thread.submit(self._runner.load).result()
        return self._thread.submit(self._runner.kv_cache_specs).result()

    def profile_memory(self) -> MemoryReport:
        """See ``Executor``."""
        return self._thread.submit(self._runner.profile_memory).result()

    def initialize_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor``."""
        self._thread.submit(self._runner.initialize_cache, config).result()
        self._thread.submit(self._runner.warm_up).result()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """See ``Executor``."""
        return self._thread.submit(self._runner.execute, plan)

    def check_health(self) -> None:
        """See ``Executor``."""
        if self._is_closed:
            raise EngineDeadError("the executor is shut down")

    def shutdown(self) -> None:
        """See ``Executor``."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown(wait=True)
