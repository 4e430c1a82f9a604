"""The KV manager: block tables of requests over one pool, prefix hits, and sliding windows.

For each cache group a request has a table; entry i is the block of tokens i * block_size .. Blocks left of a sliding
window are given back and their entries become the null block, so that tables of all groups have the same length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rabbet.contracts.scheduler import CacheHit, KVManager
from rabbet.errors import ConfigError
from rabbet.kv.hashing import extend_hashes, group_key, random_seed
from rabbet.kv.pool import BlockPool
from rabbet.types.kv import NULL_BLOCK_ID, CacheKind, KVCacheConfig, KVCacheGroup
from rabbet.types.request import Request

__all__ = ["BlockKVManager"]


@dataclass(slots=True)
class _Tables:
    """What one request holds: a table for each group, and how many blocks of each are findable by others."""

    blocks: list[list[int]]
    num_committed: list[int] = field(default_factory=list)
    num_dropped: list[int] = field(default_factory=list)


class BlockKVManager(KVManager):
    """See ``KVManager``."""

    def __init__(
        self, config: KVCacheConfig, *, enable_prefix_caching: bool = True, hash_seed: bytes | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            config: Groups and number of blocks.
            enable_prefix_caching: Whether content is ever found again.
            hash_seed: For tests; random by default.

        Raises:
            ConfigError: If a group's kind or block size is not supported.
        """
        self._groups = config.groups
        self._pool = BlockPool(config.num_blocks)
        self._enabled = enable_prefix_caching
        self._seed = hash_seed or random_seed()
        self._tables: dict[str, _Tables] = {}
        self.num_queries = 0
        self.num_hits = 0
        sizes = {group.spec.block_size for group in config.groups}
        if len(sizes) > 1:
            raise ConfigError(f"cache groups have different block sizes: {sorted(sizes)}", field="cache.block_size")
        if any(group.spec.kind is CacheKind.STATE_SPACE for group in config.groups):
            raise ConfigError("state-space layers have no cache in this release", field="cache")
        self._block_size = next(iter(sizes), 1)

    @property
    def usage(self) -> float:
        """See ``KVManager``."""
        total = self._pool.num_blocks - 1
        return (total - self._pool.num_free) / total

    @property
    def num_free_blocks(self) -> int:
        """See ``KVManager``."""
        return self._pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self._pool.num_blocks - 1

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Copies of a request's tables."""
        tables = self._tables.get(request_id)
        return [list(blocks) for blocks in tables.blocks] if tables else [[] for _ in self._groups]

    def find_hit(self, request: Request) -> CacheHit:
        """See ``KVManager``. The last known token is never part of a hit: its logits are needed."""
        empty = CacheHit(num_tokens=0, block_ids=tuple(() for _ in self._groups))
        if not self._enabled or not self._groups:
            return empty
        limit = (request.num_known_tokens - 1) // self._block_size
        extend_hashes(request, self._block_size, self._seed)
        self.num_queries += request.num_known_tokens
        length = min(limit, len(request.block_hashes))
        # Each group may shorten the hit of the others; the length falls until all agree.
        found: list[list[int]] = []
        while length > 0:
            found = [self._group_hit(group, request.block_hashes[:length]) for group in self._groups]
            shortest = min(len(blocks) for blocks in found)
            if shortest == length:
                break
            length = shortest
        if length == 0:
            return empty
        self.num_hits += length * self._block_size
        return CacheHit(num_tokens=length * self._block_size, block_ids=tuple(tuple(blocks) for blocks in found))

    def _group_hit(self, group: KVCacheGroup, hashes: list[bytes]) -> list[int]:
        """Blocks of the longest prefix that a group can continue from."""
        if group.spec.kind is CacheKind.SLIDING_WINDOW and group.spec.window is not None:
            return self._window_hit(group, hashes)
        blocks = []
        for value in hashes:
            block_id = self._pool.find(group_key(value, group.group_id))
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def _window_hit(self, group: KVCacheGroup, hashes: list[bytes]) -> list[int]:
        """The longest prefix whose last blocks, as many as the window reaches, are there; holes before them are fine."""
        assert group.spec.window is not None
        needed = -(-(group.spec.window - 1) // self._block_size)
        run: list[int] = []
        for index in range(len(hashes) - 1, -1, -1):
            block_id = self._pool.find(group_key(hashes[index], group.group_id))
            if block_id is None:
                run = []
                continue
            run.insert(0, block_id)
            if len(run) >= needed:
                return [NULL_BLOCK_ID] * index + run
        return run

    def allocate(
        self, request: Request, num_new_tokens: int, *, hit: CacheHit | None = None, num_external_tokens: int = 0
    ) -> list[list[int]] | None:
        """See ``KVManager``."""
        tables = self._tables.get(request.request_id)
        num_hit = hit.num_tokens if hit else 0
        total = request.num_computed_tokens + num_hit + num_external_tokens + num_new_tokens
        wanted = -(-total // self._block_size)
        held = len(tables.blocks[0]) if tables and tables.blocks else 0
        num_new = max(0, wanted - held - num_hit // self._block_size)
        touched = self._pool.num_free_among(item for blocks in hit.block_ids for item in blocks) if hit else 0
        if num_new * len(self._groups) + touched > self._pool.num_free:
            return None
        if tables is None:
            tables = self._tables[request.request_id] = _Tables(blocks=[[] for _ in self._groups])
            tables.num_committed = [0] * len(self._groups)
            tables.num_dropped = [0] * len(self._groups)
        added: list[list[int]] = []
        for index, blocks in enumerate(tables.blocks):
            cached = list(hit.block_ids[index]) if hit else []
            self._pool.touch(cached)
            if cached:
                tables.num_committed[index] = len(blocks) + len(cached)
                tables.num_dropped[index] = next((i for i, b in enumerate(cached) if b != NULL_BLOCK_ID), len(cached))
            added.append(cached)
        for index, blocks in enumerate(tables.blocks):
            added[index] += self._pool.take(num_new)
            blocks += added[index]
        return added

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """See ``KVManager``."""
        tables = self._tables.get(request.request_id)
        if tables is None:
            return
        full = num_computed_tokens // self._block_size
        if self._enabled and any(full > count for count in tables.num_committed):
            extend_hashes(request, self._block_size, self._seed)
            full = min(full, len(request.block_hashes))
            for group, blocks in zip(self._groups, tables.blocks, strict=True):
                for index in range(tables.num_committed[group.group_id], full):
                    if blocks[index] != NULL_BLOCK_ID:
                        self._pool.register(blocks[index], group_key(request.block_hashes[index], group.group_id))
                tables.num_committed[group.group_id] = max(full, tables.num_committed[group.group_id])
        for group, blocks in zip(self._groups, tables.blocks, strict=True):
            if group.spec.window is not None:
                self._drop_left_of_window(tables, group, blocks, num_computed_tokens)

    def _drop_left_of_window(self, tables: _Tables, group: KVCacheGroup, blocks: list[int], num_computed: int) -> None:
        """Give back blocks that no later token of the request attends to."""
        assert group.spec.window is not None
        first_needed = max(0, num_computed - (group.spec.window - 1)) // self._block_size
        start = tables.num_dropped[group.group_id]
        gone = [block for block in blocks[start:first_needed] if block != NULL_BLOCK_ID]
        if not gone:
            return
        for index in range(start, first_needed):
            blocks[index] = NULL_BLOCK_ID
        tables.num_dropped[group.group_id] = first_needed
        self._pool.release(gone)

    def release(self, request: Request) -> None:
        """See ``KVManager``. Later blocks are reused first: a prefix is worth more than a tail."""
        tables = self._tables.pop(request.request_id, None)
        if tables is not None:
            for blocks in tables.blocks:
                self._pool.release(blocks[::-1])

    def reset_prefix_cache(self) -> bool:
        """See ``KVManager``."""
        if self._tables:
            return False
        self._pool.forget_all()
        return True

    def check_integrity(self) -> None:
        """See ``KVManager``."""
        held = [block for tables in self._tables.values() for blocks in tables.blocks for block in blocks]
        self._pool.check_integrity(held)
        for request_id, tables in self._tables.items():
            lengths = {len(blocks) for blocks in tables.blocks}
            assert len(lengths) <= 1, f"tables of {request_id} have different lengths: {lengths}"
            for blocks in tables.blocks:
                real = [block for block in blocks if block != NULL_BLOCK_ID]
                assert len(real) == len(set(real)), f"{request_id} holds a block twice"
