"""Contract of a hardware platform: one class a kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.layer_ops import LayerOps

__all__ = [
    "BatchDefaults",
    "CaptureError",
    "DeviceInfo",
    "DrawBatch",
    "GraphSession",
    "MemoryInfo",
    "Platform",
    "PlatformQuery",
    "SupportsAsyncSteps",
    "SupportsGraphs",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformQuery:
    """What is asked of a platform: dtype and parallel shape of the model to serve."""

    dtype: str
    num_local_ranks: int = 1
    device_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One device. ``arch`` is what claims of manifests are compared with, e.g. ``sm_90``, ``avx512``."""

    index: int
    name: str
    arch: str
    total_memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInfo:
    """Memory of a device at this moment.

    Attributes:
        total_bytes: What the process may use at most (the container's limit where there is one).
        free_bytes: What is free now, whoever uses the rest.
        used_by_process_bytes: What this process holds.
    """

    total_bytes: int
    free_bytes: int
    used_by_process_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDefaults:
    """Defaults of the step budgets on this hardware, for one use.

    Attributes:
        max_num_batched_tokens: Tokens a step.
        max_num_seqs: Requests a step.
        memory_fraction: Share of the memory for weights, activations and KV cache.
        max_kv_cache_bytes: Ceiling of the KV cache unless the user sets a size; None is no ceiling.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    memory_fraction: float
    max_kv_cache_bytes: int | None = None


class Platform(ABC):
    """A kind of device.

    Order of calls: ``detect`` (any process, maybe without torch loaded by the plugin's probe), ``supports``,
    then in each worker ``__init__`` once, ``init_device`` once, the rest at will.
    """

    device_type: ClassVar[str]
    """``torch.device`` type, e.g. ``cpu`` or ``cuda``."""

    device_ids: tuple[str, ...] = ()
    """Devices to use, one a local rank, as ``PlatformQuery`` had them; set before ``init_device``. Empty: the first ones."""

    @classmethod
    @abstractmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        """The devices present; empty and quiet if there are none. No context is created and nothing is kept."""

    @classmethod
    @abstractmethod
    def supports(cls, query: PlatformQuery) -> tuple[Refusal, ...]:
        """Why this machine cannot serve the query; empty: it can. Pure, quick, never raises."""

    @classmethod
    @abstractmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        """Budgets for an online server or for offline batches."""

    @classmethod
    def default_dtype(cls, checkpoint_dtype: str) -> str:
        """The dtype for ``--dtype auto``; as the checkpoint's unless the hardware has no fast path for it."""
        return checkpoint_dtype

    @classmethod
    def preferences(cls, kind: str) -> tuple[str, ...]:
        """Names that "auto" tries first for a kind (``attention``, ``linear``, ``moe``, ``executor``), best first."""
        return ()

    @abstractmethod
    def init_device(self, *, local_rank: int, world_size: int) -> torch.device:
        """Claim a device for this worker process: pin threads, create the context. Called once, first."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Memory of the claimed device now; consistent under allocation."""

    def peak_activation_bytes(self) -> int | None:
        """Most memory that tensors took since the last call of ``memory``, beyond what they took then; None: cannot tell."""
        return None

    def layer_ops(self) -> LayerOps | None:
        """The platform's fused kernels for small operations, or None for core's plain torch ones."""
        return None

    def collective_backend(self) -> str:
        """Name of the ``torch.distributed`` backend for several ranks."""
        return "gloo"

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        return None


class CaptureError(Exception):
    """The work cannot be captured; the message names the operation. It can still be run without a graph."""


class GraphSession(ABC):
    """A captured step that can be replayed; made by ``SupportsGraphs.capture``.

    Sessions of one platform may share the memory of what they compute: outputs hold until the next capture or replay.
    """

    @abstractmethod
    def replay(self) -> None:
        """Run the captured work again on the same addresses."""


class SupportsGraphs(ABC):
    """Optional ability of a platform: capture a callable and replay it without host work.

    The runner captures steps of one new token a request: it keeps inputs in tensors whose addresses never change, fills
    them in before a replay, and captures only for attention backends whose ``graph_support`` allows it and for models
    with ``is_capturable``.
    """

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> GraphSession:
        """Record ``work()`` and run it once, so that its outputs hold when this returns.

        Args:
            work: Reads and writes only tensors that outlive the session, or that it makes itself; no value of a tensor
                is looked at on the host.

        Raises:
            CaptureError: If an operation cannot be replayed. The work may have run in part.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawBatch:
    """How a token is drawn from each row of logits; tensors of [B] on the device.

    Attributes:
        temperature_B: float32; 0 takes the likeliest token, the first of equal ones.
        top_k_B: int32; 0 is off.
        top_p_B: float32; 1 is off. Refers to what ``top_k`` and ``min_p`` left.
        min_p_B: float32; 0 is off.
        seed_B: int64.
        index_B: int64, of the token among the request's output tokens.
        is_random: Whether any row has a temperature.
        is_filtered: Whether any row has a filter.
    """

    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    seed_B: torch.Tensor
    index_B: torch.Tensor
    is_random: bool
    is_filtered: bool


class SupportsAsyncSteps(ABC):
    """Optional ability of a platform: the device computes what was launched while the host goes on.

    Steps are then launched one ahead: sampled ids stay on the device and feed the next step, and the host reads them
    one step late. All calls come from one thread, and what is launched runs in order.
    """

    @abstractmethod
    def mark(self) -> Callable[[], None]:
        """Mark what has been launched; the callable waits until the device has done it."""

    @abstractmethod
    def draw(self, logits_BV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
        """One token a row, int64 [B] on the device, without waiting for it; -1 where the largest logit is not finite.

        A draw depends on the row's logits and numbers alone, never on other rows: the same seed and index give the same
        token in any batch. May be captured (``SupportsGraphs``).

        Args:
            logits_BV: float32, or the model's dtype. Left as they are: a captured step's may be drawn from once more.
            batch: Of the same rows.
        """
