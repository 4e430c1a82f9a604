"""The block pool: free blocks in order of last use, reference counts, and the index of cached content.

A block is held by requests (references > 0) or stands in the free list. A free block may still have content that a
later request finds by its hash; content is forgotten only when the block is given out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rabbet.types.kv import NULL_BLOCK_ID

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 1 .. num_blocks - 1; block 0 is the null block. Every operation is O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        """Make ``num_blocks`` blocks, the null block included; at least 2."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # The free list as a doubly linked ring through the null block: oldest first.
        self._next = [*range(1, num_blocks), 0]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._num_free = num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self._num_free

    def references(self, block_id: int) -> int:
        """How many requests hold a block."""
        return self._references[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """The block with that content, or None."""
        return self._by_hash.get(block_hash)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold cached blocks once more; takes free ones out of the free list."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK_ID:
                continue
            if self._references[block_id] == 0:
                self._unlink(block_id)
            self._references[block_id] += 1

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks stand in the free list."""
        return sum(1 for block_id in block_ids if block_id != NULL_BLOCK_ID and self._references[block_id] == 0)

    def take(self, count: int) -> list[int]:
        """Give out the ``count`` blocks that were free longest; their content is forgotten."""
        if count > self._num_free:
            raise ValueError(f"{count} blocks wanted, {self._num_free} are free")
        taken = []
        for _ in range(count):
            block_id = self._next[NULL_BLOCK_ID]
            self._unlink(block_id)
            self.forget(block_id)
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks. The order given is the order in which they will be reused."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK_ID:
                continue
            count = self._references[block_id] - 1
            if count < 0:
                raise ValueError(f"block {block_id} is released more often than it was held")
            self._references[block_id] = count
            if count == 0:
                self._append(block_id)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make the content of a held block findable; False if another block has the same content already."""
        if block_hash in self._by_hash:
            return False
        assert self._references[block_id] > 0 and self._hashes[block_id] is None, (
            f"block {block_id} has content already"
        )
        self._hashes[block_id] = block_hash
        self._by_hash[block_hash] = block_id
        return True

    def forget(self, block_id: int) -> None:
        """Drop a block's content from the index."""
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None

    def forget_all(self) -> None:
        """Empty the index."""
        self._hashes = [None] * self.num_blocks
        self._by_hash.clear()

    def check_integrity(self, held: Sequence[int]) -> None:
        """Compare with all blocks that requests hold, each as often as it is held.

        Raises:
            AssertionError: If anything does not balance.
        """
        expected = [0] * self.num_blocks
        for block_id in held:
            if block_id != NULL_BLOCK_ID:
                expected[block_id] += 1
        assert expected == self._references, "reference counts differ from what requests hold"
        free, block_id = [], self._next[NULL_BLOCK_ID]
        while block_id != NULL_BLOCK_ID:
            assert self._previous[self._next[block_id]] == block_id, f"the free list is torn at block {block_id}"
            free.append(block_id)
            assert len(free) <= self.num_blocks, "the free list runs in a circle"
            block_id = self._next[block_id]
        assert len(free) == self._num_free == len(set(free)), "the free list has another length than its counter"
        assert all(self._references[item] == 0 for item in free), "a held block stands in the free list"
        assert len(free) + sum(1 for count in expected if count) == self.num_blocks - 1, "a block is lost"
        for block_hash, owner in self._by_hash.items():
            assert self._hashes[owner] == block_hash, f"the index and block {owner} disagree"
        assert sum(1 for item in self._hashes if item is not None) == len(self._by_hash), "a hash is not in the index"

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self._num_free -= 1

    def _append(self, block_id: int) -> None:
        last = self._previous[NULL_BLOCK_ID]
        self._next[last], self._previous[block_id] = block_id, last
        self._next[block_id], self._previous[NULL_BLOCK_ID] = NULL_BLOCK_ID, block_id
        self._num_free += 1
