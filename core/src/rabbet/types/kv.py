"""What a KV cache looks like, as data: one spec a layer, groups of layers, sizes in blocks and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["NULL_BLOCK_ID", "CacheKind", "KVCacheConfig", "KVCacheGroup", "KVCacheSpec", "KVCacheTensor"]

NULL_BLOCK_ID = 0
"""Block that no request owns. It fills the holes of a block table (blocks left of a sliding window)."""


class CacheKind(str, Enum):
    """How the cache of a layer grows with its request."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    STATE_SPACE = "state_space"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """The cache that one layer needs.

    Attributes:
        kind: How it grows: with the context, up to a window, or one state a request.
        block_size: Tokens a block. For ``STATE_SPACE`` the distance between two snapshots.
        num_kv_heads: Key/value heads of this rank.
        head_dim: Elements of a key head.
        head_dim_v: Elements of a value head.
        dtype: Type of stored elements as torch spells it without the prefix, e.g. ``bfloat16`` or ``uint8``.
        page_size_bytes: Bytes of one block of this layer: keys, values and scales, padding included.
        window: For ``SLIDING_WINDOW``: a token at position p attends to positions p - window + 1 .. p.
        kv_cache_dtype: Name of the KV-cache dtype whose codes the elements hold; empty: the numbers themselves.
    """

    kind: CacheKind = CacheKind.FULL_ATTENTION
    block_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    page_size_bytes: int
    window: int | None = None
    kv_cache_dtype: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table, because their specs are equal.

    Attributes:
        group_id: Position in ``KVCacheConfig.groups``; part of every block hash.
        spec: The spec of each layer in it.
        layer_names: Names of the attention layers, in the order in which the model has them.
    """

    group_id: int
    spec: KVCacheSpec
    layer_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheTensor:
    """One allocation of ``num_blocks`` pages. Layers of different groups may share it.

    Sharing is safe because a block id belongs to one group at a time.
    """

    size_bytes: int
    layer_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheConfig:
    """The whole cache of one rank, as the engine decided it.

    Attributes:
        num_blocks: Blocks in the pool, the null block included.
        groups: One entry a distinct spec.
        tensors: What the worker allocates.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[KVCacheTensor, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.size_bytes for tensor in self.tensors)
