"""Contract of a KV connector: KV blocks that come from or go to somewhere else than this engine's pool.

Two halves that exchange data only: ``ConnectorScheduler`` lives beside the scheduler, ``ConnectorWorker`` on each
rank. The plugin's class (``KVConnector``) makes both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.attention import KVLayout
    from rabbet.types.kv import KVCacheConfig
    from rabbet.types.outputs import KVTransferResult
    from rabbet.types.request import Request

__all__ = ["CacheIdentity", "ConnectorQuery", "ConnectorScheduler", "ConnectorWorker", "ExternalHit", "KVConnector"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheIdentity:
    """What must be equal before a block of another engine means the same here.

    Attributes:
        model: Name and revision or content hash of the weights.
        layouts: For each cache group its layout.
        block_sizes: For each group.
        dtype: KV-cache dtype.
        tensor_parallel_size: Ranks that share the heads.
        rank: This rank.
        digest: sha256 over all of it, the composition's digest included.
    """

    model: str
    layouts: tuple[KVLayout, ...]
    block_sizes: tuple[int, ...]
    dtype: str
    tensor_parallel_size: int
    rank: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectorQuery:
    """The setup that a connector is asked about."""

    role: str
    device_type: str
    num_groups: int
    layout_names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalHit:
    """Tokens that can be had beyond the local hit.

    Attributes:
        num_tokens: How many more; a multiple of the block size. None: not known yet, ask again next step.
        is_async: They arrive while the request waits; otherwise they are loaded inside its first step.
    """

    num_tokens: int | None
    is_async: bool = False


class ConnectorScheduler(ABC):
    """The half beside the scheduler. Called from the scheduler's thread; must not block."""

    @abstractmethod
    def find_hit(self, request: Request, num_local_tokens: int) -> ExternalHit:
        """What can be had after ``num_local_tokens``. Without side effects: it may be asked again."""

    @abstractmethod
    def on_allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The blocks to load into (a group each), after the scheduler has decided to load."""

    @abstractmethod
    def build_transfer(self, num_scheduled_tokens: Mapping[str, int]) -> bytes:
        """The message of this step to the worker half; called once a plan."""

    @abstractmethod
    def on_result(self, result: KVTransferResult) -> None:
        """The report of the worker half."""

    @abstractmethod
    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks must stay until ``finished_saving``, and what to tell the client."""

    def take_events(self) -> Sequence[Any]:
        """KV events since the last call."""
        return ()

    def close(self) -> None:
        """Free everything; idempotent."""
        return None


class ConnectorWorker(ABC):
    """The half on a rank. Called from the runner's thread."""

    @abstractmethod
    def register(self, caches: Mapping[str, torch.Tensor], config: KVCacheConfig, identity: CacheIdentity) -> None:
        """The cache tensors by layer, once."""

    @abstractmethod
    def start_step(self, transfer: bytes) -> None:
        """Begin the loads of this step, before the model runs."""

    def wait_for_layer(self, layer_name: str) -> None:
        """Return when the loads of this layer are in the cache, or have failed."""
        return None

    def save_layer(self, layer_name: str) -> None:
        """The layer's blocks of this step are complete and may be copied out."""
        return None

    @abstractmethod
    def finish_step(self) -> KVTransferResult:
        """What finished and what failed; called after the model of each step, also for steps without tokens."""

    def close(self) -> None:
        """Free everything; idempotent."""
        return None


class KVConnector(ABC):
    """Maker of the two halves."""

    @classmethod
    @abstractmethod
    def supports(cls, query: ConnectorQuery) -> tuple[Refusal, ...]:
        """Every reason why it cannot work; empty: it can."""

    @classmethod
    @abstractmethod
    def make_scheduler_half(
        cls, query: ConnectorQuery, config: KVCacheConfig, identity: CacheIdentity
    ) -> ConnectorScheduler:
        """In the engine process."""

    @classmethod
    @abstractmethod
    def make_worker_half(cls, query: ConnectorQuery) -> ConnectorWorker:
        """On each rank."""
