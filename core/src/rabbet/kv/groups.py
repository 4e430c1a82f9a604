"""Divides layers into cache groups and memory into blocks, and says how much fits.

Layers with equal specs form a group. Groups share one pool: a block id belongs to one group at a time, and layer i
of every group uses tensor i, so a pool block costs one page in each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from rabbet.errors import ConfigError
from rabbet.types.kv import CacheKind, KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor

__all__ = [
    "blocks_for_one_request",
    "build_cache_config",
    "bytes_for_one_request",
    "capacity_tokens",
    "longest_context",
    "max_concurrency",
    "max_len_that_fits",
    "page_bytes",
]


_MIN_BLOCKS = 2
_WHOLE_CONTEXT = 1 << 30


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers by spec, in the order in which the specs first come.

    Groups may hold different numbers of layers: the pool's block then has a page in as many tensors as the largest
    group has layers, and the smaller groups leave some unused.

    Raises:
        ConfigError: If pages of two specs differ in size.
    """
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    if len({spec.page_size_bytes for spec in by_spec}) > 1:
        pages = "; ".join(
            f"{spec.page_size_bytes} bytes ({spec.kind.value}, {names[0]})" for spec, names in by_spec.items()
        )
        raise ConfigError(
            f"layers of this model need KV pages of different sizes, which cannot share one pool in this release: {pages}",
            field="cache",
        )
    return tuple(
        KVCacheGroup(group_id=index, spec=spec, layer_names=tuple(names))
        for index, (spec, names) in enumerate(by_spec.items())
    )


def page_bytes(groups: tuple[KVCacheGroup, ...]) -> int:
    """Bytes that one block of the pool costs over all tensors."""
    if not groups:
        return 0
    return max(len(group.layer_names) for group in groups) * groups[0].spec.page_size_bytes


def build_cache_config(
    specs: Mapping[str, KVCacheSpec], available_bytes: int, num_blocks_override: int | None = None
) -> KVCacheConfig:
    """Groups, tensors and the number of blocks.

    Args:
        specs: Layer to spec.
        available_bytes: What the cache may take.
        num_blocks_override: Exactly that many blocks instead.

    A model without attention layers gets the smallest pool, which costs no memory.
    """
    groups = group_layers(specs)
    size = page_bytes(groups)
    if num_blocks_override is not None:
        num_blocks = num_blocks_override
    else:
        num_blocks = max(0, available_bytes) // size if size else _MIN_BLOCKS
    num_tensors = max((len(group.layer_names) for group in groups), default=0)
    tensors = tuple(
        KVCacheTensor(
            size_bytes=num_blocks * groups[0].spec.page_size_bytes,
            layer_names=tuple(group.layer_names[i] for group in groups if i < len(group.layer_names)),
        )
        for i in range(num_tensors)
    )
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=tensors)


def _blocks(spec: KVCacheSpec, num_tokens: int, max_step_tokens: int) -> int:
    """Blocks that one request of ``num_tokens`` holds at most in a group.

    A sliding window's blocks are given back when a step's result is taken in, so until then a request holds

        |-- window - 1 --|-- tokens planned since --|   and a block that neither end fills
    """
    if spec.kind is CacheKind.STATE_SPACE:
        return 1
    if spec.kind is CacheKind.SLIDING_WINDOW and spec.window is not None:
        num_tokens = min(num_tokens, spec.window - 1 + max_step_tokens + spec.block_size)
    return -(-num_tokens // spec.block_size)


def blocks_for_one_request(
    groups: tuple[KVCacheGroup, ...], num_tokens: int, max_step_tokens: int = _WHOLE_CONTEXT
) -> int:
    """Blocks over all groups that one request of ``num_tokens`` needs.

    Args:
        groups: The cache groups.
        num_tokens: Length of the request.
        max_step_tokens: Tokens planned at most before a result is taken in: of two steps with async scheduling. The
            default is safe for any.
    """
    return sum(_blocks(group.spec, num_tokens, max_step_tokens) for group in groups)


def bytes_for_one_request(specs: Mapping[str, KVCacheSpec], max_model_len: int) -> int:
    """Bytes of a cache that holds exactly one request of the longest context, the null block included."""
    groups = group_layers(specs)
    return (blocks_for_one_request(groups, max_model_len) + 1) * page_bytes(groups)


def longest_context(
    groups: tuple[KVCacheGroup, ...], num_blocks: int, limit: int, max_step_tokens: int = _WHOLE_CONTEXT
) -> int:
    """The longest context, up to ``limit``, of which one request fits into a pool of ``num_blocks``; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for_one_request(groups, middle, max_step_tokens) <= num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low


def max_len_that_fits(specs: Mapping[str, KVCacheSpec], num_blocks: int, limit: int) -> int:
    """``longest_context`` of the layers' groups."""
    return longest_context(group_layers(specs), num_blocks, limit)


def max_concurrency(config: KVCacheConfig, max_model_len: int, max_step_tokens: int = _WHOLE_CONTEXT) -> float:
    """How many requests of the longest context fit at once."""
    needed = blocks_for_one_request(config.groups, max_model_len, max_step_tokens)
    return max(0, config.num_blocks - 1) / needed if needed else float("inf")


def capacity_tokens(config: KVCacheConfig) -> int:
    """Tokens that the cache holds if every block is full."""
    if not config.groups:
        return 0
    return max(0, config.num_blocks - 1) // len(config.groups) * config.groups[0].spec.block_size
