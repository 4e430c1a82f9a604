"""The executor for one rank: the runner lives in a thread of this process, and steps run there in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from rabbet.contracts import Refusal, register_executor
from rabbet.contracts.executor import Executor, ExecutorQuery, MemoryReport
from rabbet.contracts.platform import SupportsAsyncSteps
from rabbet.errors import EngineDeadError
from rabbet.runner.runner import DeviceRunner
from rabbet.types.kv import KVCacheConfig, KVCacheSpec
from rabbet.types.outputs import StepResult
from rabbet.types.plan import StepPlan

__all__ = ["UniExecutor"]

_T = TypeVar("_T")


class _Launched(Future[StepResult]):
    """A step on a device: asking for its result is what waits for it."""

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> StepResult:
        """See ``Future``; waits as long as the device takes."""
        return self._wait()


@register_executor("uni")
class UniExecutor(Executor):
    """One rank in this process.

    Everything that touches the device runs in one thread: kernels keep their own threads by the thread that calls
    them, and while a step runs the scheduler plans the next one. Where the device itself runs ahead of the host that
    thread is the caller's: a step is launched in the time that handing it over would take.
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
        is_async = issubclass(config.composition.load("platform"), SupportsAsyncSteps)
        self._thread = None if is_async else ThreadPoolExecutor(max_workers=1, thread_name_prefix="rabbet-runner")
        self._runner = DeviceRunner(config)
        self._death: EngineDeadError | None = None
        self._is_closed = False

    def load(self) -> dict[str, KVCacheSpec]:
        """See ``Executor``."""
        self._call(self._runner.load)
        return self._call(self._runner.kv_cache_specs)

    def profile_memory(self) -> MemoryReport:
        """See ``Executor``."""
        return self._call(self._runner.profile_memory)

    def initialize_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor``."""
        self._call(self._runner.initialize_cache, config)
        self._call(self._runner.warm_up)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """See ``Executor``."""
        if self._thread is not None:
            return self._thread.submit(self._runner.execute, plan)
        try:
            return _Launched(partial(self._watched, self._watched(self._runner.launch, plan)))
        except Exception as error:  # noqa: BLE001  whoever waits for the step is told
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def _watched(self, function: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return function(*arguments)
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            # An error of a device stays: whatever is launched after it fails, too.
            self._death = EngineDeadError(f"a step failed: {error}")
            raise

    def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return function(*arguments) if self._thread is None else self._thread.submit(function, *arguments).result()

    def check_health(self) -> None:
        """See ``Executor``."""
        if self._is_closed:
            raise EngineDeadError("the executor is shut down")
        if self._death is not None:
            raise self._death

    def shutdown(self) -> None:
        """See ``Executor``."""
        if not self._is_closed:
            self._is_closed = True
            self._call(self._runner.close)
            if self._thread is not None:
                self._thread.shutdown(wait=True)
