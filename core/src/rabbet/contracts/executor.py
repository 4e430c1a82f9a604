"""Contract of an executor: it runs the model runner on one rank or on many, and of the runner that it drives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    from rabbet.types.kv import KVCacheConfig, KVCacheSpec
    from rabbet.types.outputs import StepResult
    from rabbet.types.plan import StepPlan

__all__ = ["Executor", "ExecutorQuery", "MemoryReport", "ModelRunner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorQuery:
    """The parallel shape that an executor is asked to run."""

    world_size: int
    num_nodes: int = 1
    is_async: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory of one rank after loading and a profiling step, in bytes.

    Attributes:
        total_bytes: Of the device.
        weights_bytes: Weights and buffers.
        activation_bytes: Peak of a step with the largest batch, beyond the weights.
        available_kv_bytes: What is left for the KV cache under the configured limits.
    """

    total_bytes: int
    weights_bytes: int
    activation_bytes: int
    available_kv_bytes: int


class ModelRunner(ABC):
    """Runs plans on one device. The executor calls it from one thread, in the order listed."""

    @abstractmethod
    def load(self) -> None:
        """Claim the device, build the model, load its weights."""

    @abstractmethod
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Attention layer to spec, in the model's order."""

    @abstractmethod
    def profile_memory(self) -> MemoryReport:
        """Run the largest step without a cache and measure."""

    @abstractmethod
    def initialize_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache and bind it to the layers."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile, capture and tune whatever the first requests would pay for otherwise."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin one step; the callable waits for it. Where nothing can run ahead the whole step runs here."""
        result = self.execute(plan)
        return lambda: result

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""


class Executor(ABC):
    """Runs one ``ModelRunner`` a rank and speaks for all of them.

    ``config`` says what to run. An executor reads its ``world_size``, the number of ranks, and hands the rest on as it is.
    Order of calls as listed; ``execute`` may be called again before the future of the step before is done, up to
    ``max_concurrent_steps`` steps.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def config_bytes(self) -> bytes:
        """``config`` for ``make_runner`` in another process."""
        data: bytes = import_module("rabbet.config.resolved").resolved_to_bytes(self.config)
        return data

    @staticmethod
    def make_runner(config: Any, *, rank: int = 0, world_size: int = 1, init_method: str = "") -> ModelRunner:
        """Core's runner for one rank, in the process that is to run it; claims nothing before ``load``.

        Args:
            config: What the executor was made with, or ``config_bytes()`` of it in another process, which must find the
                same plugins: start it with the ``sys.path`` of this one.
            rank: Which one.
            world_size: How many.
            init_method: Where ranks meet, as for ``torch.distributed.init_process_group``, e.g. ``file:///...``.

        Raises:
            rabbet.errors.CompositionMismatchError: If the process holds other plugins than were decided.
        """
        where = {"rank": rank, "world_size": world_size, "init_method": init_method}
        made: ModelRunner = import_module("rabbet.runner.make").make_runner(config, **where)
        return made

    @classmethod
    @abstractmethod
    def supports(cls, query: ExecutorQuery) -> tuple[Refusal, ...]:
        """Every reason why the shape cannot be run; empty: it can."""

    @abstractmethod
    def load(self) -> dict[str, KVCacheSpec]:
        """Start the ranks, load the model, return the cache specs of one rank (all ranks have the same)."""

    @abstractmethod
    def profile_memory(self) -> MemoryReport:
        """The report of the tightest rank."""

    @abstractmethod
    def initialize_cache(self, config: KVCacheConfig) -> None:
        """Allocate the same cache on all ranks and warm up."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Run one step on all ranks; returns at once. Steps run in the order of the calls.

        A failure of one rank fails the future with what happened, and the engine ends the requests of that step. If no
        later step can run, as where ranks have lost step with one another, ``check_health`` raises from then on;
        otherwise later steps give what they give without the failed one.
        """

    def evidence(self) -> Sequence[tuple[str, str]]:
        """Changes of core that its other processes found: owner and place. Asked once, after ``initialize_cache``."""
        return ()

    @property
    def max_concurrent_steps(self) -> int:
        """Steps that may be under way at once: 1 without async scheduling, 2 with it."""
        return 2

    @abstractmethod
    def check_health(self) -> None:
        """Raise ``rabbet.errors.EngineDeadError`` if a rank has ended or hangs."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all ranks and wait for them; idempotent."""
