"""The KV manager: block tables of requests over one pool, prefix hits, and sliding windows.

For each cache group a request has a table; entry i is the block of the tokens from i * block_size on. Blocks left of a
sliding window are given back and their entries become the null block, so that tables of all groups have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rabbet.contracts.scheduler import CacheHit, KVManager
from rabbet.errors import ConfigError
from rabbet.kv.hashing import extend_hashes, group_key, random_seed
from rabbet.kv.pool import BlockPool
from rabbet.types.kv import NULL_BLOCK_ID, CacheKind, KVCacheConfig, KVCacheGroup
from rabbet.types.request import Request

__all__ = ["BlockKVManager"]


@dataclass(slots=True)
class _Tables:
    """What one request holds.

    Attributes:
        blocks: A table for each group, all of one length.
        num_committed: Leading blocks that are findable by others already.
        num_dropped: For each group, leading entries that are null blocks.
    """

    blocks: list[list[int]]
    num_dropped: list[int]
    num_committed: int = 0


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
        sizes = {group.spec.block_size for group in config.groups}
        if len(sizes) > 1:
            raise ConfigError(f"cache groups have different block sizes: {sorted(sizes)}", field="cache.block_size")
        for group in config.groups:
            if group.spec.kind is CacheKind.STATE_SPACE:
                raise ConfigError(
                    f"state-space layers ({group.layer_names[0]} and others) have no cache in this release",
                    field="cache",
                )
        self._groups = config.groups
        self._windows = tuple(group for group in config.groups if group.spec.window is not None)
        self._pool = BlockPool(config.num_blocks)
        self._enabled = enable_prefix_caching and bool(config.groups)
        self._seed = hash_seed or random_seed()
        self._tables: dict[str, _Tables] = {}
        self._block_size = next(iter(sizes), 1)
        self._miss = CacheHit(num_tokens=0, block_ids=tuple(() for _ in self._groups))
        self.num_queries = 0
        self.num_hits = 0

    @property
    def usage(self) -> float:
        """See ``KVManager``."""
        total = self._pool.num_blocks - 1
        return (total - self._pool.num_free) / total

    @property
    def num_free_blocks(self) -> int:
        """See ``KVManager``."""
        return self._pool.num_free

    def block_ids(self, request_id: str) -> list[list[int]]:
        """See ``KVManager``."""
        tables = self._tables.get(request_id)
        return [list(blocks) for blocks in tables.blocks] if tables else [[] for _ in self._groups]

    def find_hit(self, request: Request) -> CacheHit:
        """See ``KVManager``. The last known token is never part of a hit: its logits are needed."""
        if not self._enabled:
            return self._miss
        extend_hashes(request, self._block_size, self._seed)
        length = min((request.num_known_tokens - 1) // self._block_size, len(request.block_hashes))
        # Each group may shorten the hit of the others; the length falls until all agree.
        while length > 0:
            hashes = request.block_hashes[:length]
            found = [self._group_hit(group, hashes) for group in self._groups]
            shortest = min(len(blocks) for blocks in found)
            if shortest == length:
                return CacheHit(
                    num_tokens=length * self._block_size,
                    block_ids=tuple(tuple(blocks) for blocks in found),
                    num_idle_blocks=self._pool.num_free_among(block for blocks in found for block in blocks),
                )
            length = shortest
        return self._miss

    def _group_hit(self, group: KVCacheGroup, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix that a group can continue from."""
        if group.spec.window is not None:
            return self._window_hit(group, group.spec.window, hashes)
        blocks = []
        for value in hashes:
            block_id = self._pool.find(group_key(value, group.group_id))
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def _window_hit(self, group: KVCacheGroup, window: int, hashes: Sequence[bytes]) -> list[int]:
        """The longest prefix of which the last blocks, as many as the window reaches, are there.

        | null | null | null | found | found |  next token
                             |--- window ----|
        """
        needed = -(-(window - 1) // self._block_size)
        if needed == 0:
            return [NULL_BLOCK_ID] * len(hashes)
        run: list[int] = []
        for index in range(len(hashes) - 1, -1, -1):
            block_id = self._pool.find(group_key(hashes[index], group.group_id))
            if block_id is None:
                run = []
                continue
            run.append(block_id)
            if len(run) >= needed:
                return [NULL_BLOCK_ID] * index + run[::-1]
        return run[::-1]

    def allocate(
        self, request: Request, num_new_tokens: int, *, hit: CacheHit | None = None, num_external_tokens: int = 0
    ) -> list[list[int]] | None:
        """See ``KVManager``."""
        tables = self._tables.get(request.request_id)
        num_hit = hit.num_tokens if hit else 0
        total = request.num_computed_tokens + num_hit + num_external_tokens + num_new_tokens
        held = len(tables.blocks[0]) if tables and tables.blocks else 0
        num_new = -(-total // self._block_size) - held - num_hit // self._block_size
        if tables is not None and hit is None and num_new <= 0:
            return [[] for _ in self._groups]
        num_new = max(0, num_new)
        touched = self._pool.num_free_among(item for blocks in hit.block_ids for item in blocks) if hit else 0
        if num_new * len(self._groups) + touched > self._pool.num_free:
            return None
        if tables is None:
            tables = self._tables[request.request_id] = _Tables(
                blocks=[[] for _ in self._groups], num_dropped=[0] * len(self._groups)
            )
        if hit is not None:
            self._take_hit(request, tables, hit)
        for blocks in tables.blocks:
            blocks += self._pool.take(num_new)
        return [blocks[held:] for blocks in tables.blocks]

    def _take_hit(self, request: Request, tables: _Tables, hit: CacheHit) -> None:
        """Reference the hit's blocks, all groups before any block is given out, and count it once a request."""
        for index, found in enumerate(hit.block_ids):
            self._pool.touch(found)
            tables.blocks[index] += found
            tables.num_dropped[index] = next((i for i, block in enumerate(found) if block != NULL_BLOCK_ID), len(found))
        tables.num_committed = hit.num_tokens // self._block_size
        if self._enabled and request.num_preemptions == 0:
            self.num_queries += request.num_known_tokens
            self.num_hits += hit.num_tokens

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """See ``KVManager``."""
        tables = self._tables.get(request.request_id)
        if tables is None:
            return
        if self._enabled and num_computed_tokens // self._block_size > tables.num_committed:
            self._register(request, tables, num_computed_tokens // self._block_size)
        for group in self._windows:
            self._drop_left_of_window(tables, group, num_computed_tokens)

    def _register(self, request: Request, tables: _Tables, num_full: int) -> None:
        extend_hashes(request, self._block_size, self._seed)
        num_full = min(num_full, len(request.block_hashes))
        for group, blocks in zip(self._groups, tables.blocks, strict=True):
            for index in range(tables.num_committed, num_full):
                if blocks[index] != NULL_BLOCK_ID:
                    self._pool.register(blocks[index], group_key(request.block_hashes[index], group.group_id))
        tables.num_committed = max(num_full, tables.num_committed)

    def _drop_left_of_window(self, tables: _Tables, group: KVCacheGroup, num_computed: int) -> None:
        """Give back blocks that no later token of the request attends to; they stay findable until they are reused."""
        assert group.spec.window is not None
        first_needed = max(0, num_computed - (group.spec.window - 1)) // self._block_size
        start = tables.num_dropped[group.group_id]
        if first_needed <= start:
            return
        blocks = tables.blocks[group.group_id]
        gone = blocks[start:first_needed]
        blocks[start:first_needed] = [NULL_BLOCK_ID] * len(gone)
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
        owners: dict[int, int] = {}
        for request_id, tables in self._tables.items():
            lengths = {len(blocks) for blocks in tables.blocks}
            assert len(lengths) <= 1, f"tables of {request_id} have different lengths: {lengths}"
            for group, blocks in enumerate(tables.blocks):
                dropped = tables.num_dropped[group]
                assert all(block == NULL_BLOCK_ID for block in blocks[:dropped]), f"{request_id} holds a dropped block"
                real = blocks[dropped:]
                assert NULL_BLOCK_ID not in real, f"{request_id} has a hole in its table"
                assert len(real) == len(set(real)), f"{request_id} holds a block twice"
                for block in real:
                    assert owners.setdefault(block, group) == group, f"block {block} belongs to two groups"
