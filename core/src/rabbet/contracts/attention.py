"""Contract of an attention backend: paged attention over the KV cache of one group of layers.

Shapes: T tokens, H query heads, K key/value heads, D head size, E head size of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from rabbet.contracts.support import Refusal
from rabbet.types.kv import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.batch import AttentionBatch

__all__ = [
    "AttentionBackend",
    "AttentionContext",
    "AttentionLayerSpec",
    "AttentionQuery",
    "GraphSupport",
    "KVLayout",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionQuery:
    """One setup that a backend is asked about. Every group of layers of a model makes one query.

    Attributes:
        device_type: ``cpu``, ``cuda``, ...
        arch: Architecture of the device, e.g. ``sm_90``.
        dtype: Type of queries and outputs, e.g. ``bfloat16``.
        kv_cache_dtype: Name of the KV-cache dtype, already resolved (never ``auto``).
        num_heads: Query heads of one rank.
        num_kv_heads: Key/value heads of one rank.
        head_dim: Size of query and key heads.
        head_dim_v: Size of value heads.
        block_size: Tokens a block.
        window: Sliding window in tokens, or None.
        has_soft_cap: Logits go through ``cap * tanh(x / cap)``.
        has_sinks: Each head has a learned logit without a value.
        has_alibi: A slope a head times the distance is added.
        is_causal: As in ``AttentionBatch``.
        scope: ``target``, ``drafter`` or ``encoder``: an explicit choice holds for its scope only.
        features: Further needs by name, e.g. ``graphs``, ``log_sum_exp``, ``batch_invariant``.
    """

    device_type: str
    arch: str
    dtype: str
    kv_cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    block_size: int
    window: int | None = None
    has_soft_cap: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    is_causal: bool = True
    scope: str = "target"
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """How one block of a layer lies in memory. Axis 0 of the cache tensor is the block; the rest is listed here.

    A block's page is contiguous, so that connectors copy pages and groups can share an allocation.

    Attributes:
        name: Identity for connectors and peers, with its version, e.g. ``nhd-1``: equal names, equal meaning of bytes.
        axes: Names of the axes inside a block: of ``kv``, ``slot``, ``head``, ``dim`` (or the backend's own).
        shape: Sizes of these axes.
        dtype: Element type, e.g. ``bfloat16`` or ``uint8``.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What a backend instance is built from; it serves all layers of one cache group on one rank.

    Attributes:
        spec: The group's cache spec.
        query: The query that the backend accepted.
        device: Where tensors live.
        max_num_tokens: Most tokens a step.
        max_num_requests: Most requests a step.
        max_model_len: Longest context.
        options: The backend's options, validated against its schema.
    """

    spec: KVCacheSpec
    query: AttentionQuery
    device: torch.device
    max_num_tokens: int
    max_num_requests: int
    max_model_len: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayerSpec:
    """Constants of one attention layer.

    Attributes:
        name: Its name in the model, unique.
        scale: Factor of the logits, usually D ** -0.5.
        window: Sliding window: a token at p sees p - window + 1 .. p, and where the batch is not causal as far the other
            way, .. p + window - 1, its request's tokens only; None sees all.
        soft_cap: Cap of the logits, or None.
        sinks: [H] learned logits, or None.
        alibi_slopes: float32 [H], or None.
        k_scale: Keys in the cache are the true keys divided by it.
        v_scale: Likewise for values.
        k_head_scales: float32 [K] on the device, instead of ``k_scale``: one for each key head. Given if and only if the
            KV-cache dtype's ``PageFormat`` has them.
        v_head_scales: Likewise for values.
    """

    name: str
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_head_scales: torch.Tensor | None = None
    v_head_scales: torch.Tensor | None = None


class GraphSupport(Enum):
    """Which batches a backend can be captured for: none, those with one query token a request (``DECODE``), with equally
    many a request (``UNIFORM``), any (``ALWAYS``), or any that another may take the place of (``RAGGED``).

    ``build_metadata`` and ``forward`` run inside of the capture, on tensors whose addresses stay. Before a replay the engine
    changes what stands in ``seq_lens``, ``positions``, ``block_table`` and ``slot_mapping``, in queries, keys and values;
    numbers of requests and tokens and ``query_start`` are those of the capture, and so may be what the host holds of the
    lengths. ``max_seq_len`` is the longest possible, tables have their full width, and rows that a batch is filled up with
    have no slots and the null block as their table. Not to be looked at on the host: any value of a tensor but those of
    ``query_start_cpu``.

    Under ``RAGGED`` the engine changes ``query_start`` too, where a batch says so (``AttentionBatch.is_ragged``): requests
    of any numbers of tokens, 0 among them, that together have at most ``num_tokens``. ``query_start_cpu`` says nothing then.
    """

    NEVER = "never"
    DECODE = "decode"
    UNIFORM = "uniform"
    ALWAYS = "always"
    RAGGED = "ragged"


class AttentionBackend(ABC):
    """Paged attention.

    Order of calls on each rank: ``supports``, ``kv_layout`` (before memory is divided), ``__init__`` once a cache
    group, then for each step ``build_metadata`` once a group and ``forward`` once a layer of the group.
    """

    @classmethod
    @abstractmethod
    def supports(cls, query: AttentionQuery) -> tuple[Refusal, ...]:
        """Every reason why the query cannot be served; empty: it can. Pure, quick, never raises.

        A backend must refuse what it would compute wrongly: a window, a soft cap, sinks or ALiBi that it ignores.
        """

    @classmethod
    @abstractmethod
    def kv_layout(cls, spec: KVCacheSpec) -> KVLayout:
        """The layout of one block for layers of ``spec``; its bytes are at most ``spec.page_size_bytes``.

        ``spec.kv_cache_dtype`` names the codes of the elements; scales that stand in the page have room in it.
        """

    @classmethod
    def block_sizes(cls) -> tuple[int, ...]:
        """Block sizes that work, the preferred one first. A multiple of one of them works too."""
        return (16,)

    @classmethod
    def graph_support(cls) -> GraphSupport:
        """Which batches may be captured in a device graph; other than ``NEVER`` if ``supports`` accepts ``graphs``."""
        return GraphSupport.NEVER

    def __init__(self, context: AttentionContext) -> None:
        """Keep ``context`` and allocate what all steps share. Cheap enough to run at start only."""
        self.context = context

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> Any:
        """What ``forward`` needs to know of the step; shared by the layers of the group, which must not change it."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayerSpec,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        out_THE: torch.Tensor,
    ) -> None:
        """Store keys and values of the step in the cache, then attend and write ``out_THE``.

        Args:
            layer: Constants of the layer.
            q_THD: Queries; last axis contiguous, token axis may be strided. Rows past ``num_tokens`` are garbage.
            k_TKD: Keys of the step's tokens, rotated. Not attended to before they are in the cache's dtype, so
                that the result is the same whether a token came in this step or an earlier one.
            v_TKE: Values of the step's tokens.
            kv_cache: [blocks, *kv_layout.shape]. Only slots of ``slot_mapping`` change. Unused slots may hold
                anything, NaN included, and must not reach the output.
            metadata: From ``build_metadata`` of this step.
            out_THE: Output, contiguous; every row below ``num_tokens`` is written, no other.
        """
