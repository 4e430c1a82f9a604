"""Random life of the KV manager: what is found is right, the longest there is, and nobody's block is written by another."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rabbet.kv.groups import build_cache_config
from rabbet.kv.hashing import extend_hashes, group_key
from rabbet.kv.manager import BlockKVManager
from rabbet.types.kv import CacheKind, KVCacheSpec
from rabbet.types.request import EngineRequest, Request
from rabbet.types.sampling import SamplingParams

BLOCK = 4
SEED = b"test"

Content = tuple[int, str | None, tuple[int, ...]]


class World:
    """The manager, and what each block truly holds: group, salt and all tokens up to its end."""

    def __init__(self, windows: tuple[int | None, ...], num_blocks: int, rng: random.Random) -> None:
        specs = {
            str(i): KVCacheSpec(
                kind=CacheKind.FULL_ATTENTION if window is None else CacheKind.SLIDING_WINDOW, window=window,
                block_size=BLOCK, num_kv_heads=1, head_dim=8, head_dim_v=8, dtype="float32", page_size_bytes=64,
            )
            for i, window in enumerate(windows)
        }  # fmt: skip
        self.windows, self.rng = windows, rng
        self.kv = BlockKVManager(build_cache_config(specs, 0, num_blocks), hash_seed=SEED)
        self.content: dict[int, Content] = {}
        self.live: list[Request] = []
        self.chunks = [[rng.randrange(9) for _ in range(BLOCK)] for _ in range(3)]
        self.num_hits = 0

    def start(self, name: str) -> None:
        tokens = [token for _ in range(self.rng.randint(0, 6)) for token in self.rng.choice(self.chunks)]
        tokens += [self.rng.randrange(9) for _ in range(self.rng.randint(1, 6))]
        spec = EngineRequest(
            request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(), max_tokens=8,
            cache_salt=self.rng.choice([None, "x"]),
        )  # fmt: skip
        item = Request(spec=spec, token_ids=list(tokens), seed=0)
        hit = self.kv.find_hit(item)
        self.check_hit(item, hit.num_tokens, hit.block_ids)
        before = self.kv.num_free_blocks
        count = self.rng.randint(1, len(tokens) - hit.num_tokens)
        blocks = self.kv.allocate(item, count, hit=hit)
        if blocks is None:
            assert self.kv.num_free_blocks == before
            return
        self.num_hits += hit.num_tokens
        item.num_computed_tokens = hit.num_tokens
        self.live.append(item)
        self.compute(item, count)

    def check_hit(self, item: Request, num_tokens: int, found: tuple[tuple[int, ...], ...]) -> None:
        assert num_tokens % BLOCK == 0 and num_tokens < len(item.token_ids)
        for group, blocks in enumerate(found):
            for index, block in enumerate(blocks):
                wanted = (group, item.spec.cache_salt, tuple(item.token_ids[: (index + 1) * BLOCK]))
                assert block == 0 or self.content[block] == wanted, "a hit has other content"
        lengths = [n for n in range((len(item.token_ids) - 1) // BLOCK + 1) if self.is_usable(item, n)]
        assert num_tokens == max(lengths) * BLOCK, "there is a longer hit"

    def is_usable(self, item: Request, length: int) -> bool:
        """By its definition: every group has all blocks that the next token sees."""
        extend_hashes(item, BLOCK, SEED)
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, length - -(-(window - 1) // BLOCK))
            for index in range(first, length):
                if self.kv._pool.find(group_key(item.block_hashes[index], group)) is None:
                    return False
        return True

    def grow(self, item: Request) -> None:
        if item.num_computed_tokens == len(item.token_ids):
            item.token_ids.append(self.rng.randrange(9))
        count = self.rng.randint(1, len(item.token_ids) - item.num_computed_tokens)
        if self.kv.allocate(item, count) is None:
            self.stop(item)
        else:
            self.compute(item, count)

    def compute(self, item: Request, count: int) -> None:
        start, end = item.num_computed_tokens, item.num_computed_tokens + count
        for group, blocks in enumerate(self.kv.block_ids(item.request_id)):
            for index in range(start // BLOCK, -(-end // BLOCK)):
                assert blocks[index] != 0, "a block to be written is missing"
                tokens = tuple(item.token_ids[: min(end, (index + 1) * BLOCK)])
                self.content[blocks[index]] = (group, item.spec.cache_salt, tokens)
        item.num_computed_tokens = end
        if self.rng.random() < 0.8:
            self.kv.commit(item, end)
        self.check_tables()

    def check_tables(self) -> None:
        for item in self.live:
            for group, blocks in enumerate(self.kv.block_ids(item.request_id)):
                window = self.windows[group]
                first = 0 if window is None else max(0, item.num_computed_tokens - window + 1) // BLOCK
                for index in range(first, -(-item.num_computed_tokens // BLOCK)):
                    end = min((index + 1) * BLOCK, item.num_computed_tokens)
                    seen = self.content[blocks[index]]
                    assert seen == (group, item.spec.cache_salt, tuple(item.token_ids[:end])), "a block was overwritten"

    def stop(self, item: Request) -> None:
        self.live.remove(item)
        self.kv.release(item)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    windows=st.sampled_from([(None,), (6,), (None, 6), (1, None, 9)]),
    num_blocks=st.integers(8, 60),
)
def test_hits_are_right_and_longest_and_blocks_have_one_writer(
    seed: int, windows: tuple[int | None, ...], num_blocks: int
) -> None:
    rng = random.Random(seed)
    world = World(windows, num_blocks, rng)
    for turn in range(120):
        action = rng.random()
        if action < 0.3 or not world.live:
            world.start(f"r{turn}")
        elif action < 0.8:
            world.grow(rng.choice(world.live))
        else:
            world.stop(rng.choice(world.live))
        world.kv.check_integrity()
    assert world.kv.num_hits == world.num_hits
    for item in list(world.live):
        world.stop(item)
    assert world.kv.usage == 0
    assert world.kv.reset_prefix_cache()
    world.kv.check_integrity()
