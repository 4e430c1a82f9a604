"""Hits, salts, windows and sizes of the KV cache."""

from __future__ import annotations

import pytest

from rabbet.errors import ConfigError
from rabbet.kv.groups import (
    build_cache_config,
    bytes_for_one_request,
    capacity_tokens,
    longest_context,
    max_concurrency,
    max_len_that_fits,
)
from rabbet.kv.manager import BlockKVManager
from rabbet.kv.pool import BlockPool
from rabbet.types.kv import CacheKind, KVCacheSpec
from rabbet.types.request import EngineRequest, Request
from rabbet.types.sampling import SamplingParams

COMMON = {
    "block_size": 4,
    "num_kv_heads": 1,
    "head_dim": 16,
    "head_dim_v": 16,
    "dtype": "float32",
    "page_size_bytes": 512,
}
FULL = KVCacheSpec(**COMMON)
FULL_TOO = KVCacheSpec(**{**COMMON, "num_kv_heads": 2})
LOCAL = KVCacheSpec(kind=CacheKind.SLIDING_WINDOW, window=6, **COMMON)


def request(name: str, tokens: list[int], **options: str) -> Request:
    spec = EngineRequest(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(), max_tokens=8, **options)
    return Request(spec=spec, token_ids=list(tokens), seed=0)


def manager(num_blocks: int = 32, **specs: KVCacheSpec) -> BlockKVManager:
    return BlockKVManager(build_cache_config(specs or {"a": FULL}, 0, num_blocks), hash_seed=b"test")


def fill(kv: BlockKVManager, item: Request) -> None:
    assert kv.allocate(item, item.num_known_tokens) is not None
    item.num_computed_tokens = item.num_known_tokens
    kv.commit(item, item.num_known_tokens)


def test_hit_covers_full_blocks_and_never_the_last_token() -> None:
    kv = manager()
    fill(kv, request("a", list(range(12))))
    assert kv.find_hit(request("b", list(range(12)))).num_tokens == 8
    assert kv.find_hit(request("c", list(range(13)))).num_tokens == 12
    assert kv.find_hit(request("d", [*range(7), 99, 8, 9])).num_tokens == 4
    assert kv.find_hit(request("e", list(range(4)))).num_tokens == 0


@pytest.mark.parametrize("option", [{"cache_salt": "x"}, {"adapter": "x"}])
def test_salt_and_adapter_keep_requests_apart(option: dict[str, str]) -> None:
    kv = manager()
    fill(kv, request("a", list(range(12))))
    assert kv.find_hit(request("b", list(range(12)), **option)).num_tokens == 0
    fill(kv, request("c", list(range(12)), **option))
    assert kv.find_hit(request("d", list(range(12)), **option)).num_tokens == 8


def test_salt_is_not_adapter_and_lengths_do_not_run_together() -> None:
    kv = manager(64)
    fill(kv, request("a", list(range(12)), cache_salt="ab", adapter="c"))
    assert kv.find_hit(request("b", list(range(12)), cache_salt="a", adapter="bc")).num_tokens == 0
    assert kv.find_hit(request("c", list(range(12)), cache_salt="c", adapter="ab")).num_tokens == 0


def test_two_engines_hash_differently() -> None:
    config = build_cache_config({"a": FULL}, 0, 16)
    first, second = BlockKVManager(config), BlockKVManager(config)
    item, other = request("a", list(range(8))), request("a", list(range(8)))
    first.find_hit(item)
    second.find_hit(other)
    assert item.block_hashes and item.block_hashes != other.block_hashes


def test_freed_blocks_are_found_until_they_are_reused() -> None:
    kv = manager(num_blocks=8)
    item = request("a", list(range(12)))
    fill(kv, item)
    kv.release(item)
    assert kv.find_hit(request("b", list(range(13)))).num_tokens == 12
    fill(kv, request("c", [50 + i for i in range(20)]))
    # Seven blocks: five are taken anew, and the tail of the old prefix goes first.
    assert kv.find_hit(request("d", list(range(13)))).num_tokens == 8
    kv.check_integrity()


def test_allocation_that_fails_changes_nothing() -> None:
    kv = manager(num_blocks=4)
    before = kv.num_free_blocks
    assert kv.allocate(request("a", list(range(40))), 40) is None
    assert kv.num_free_blocks == before
    kv.check_integrity()


def test_window_gives_blocks_back_and_hits_need_its_last_blocks_only() -> None:
    kv = manager(64, full=FULL, local=LOCAL)
    item = request("a", list(range(24)))
    fill(kv, item)
    assert kv.block_ids("a")[1][:4] == [0, 0, 0, 0]
    assert all(block != 0 for block in kv.block_ids("a")[0])
    hit = kv.find_hit(request("b", list(range(25))))
    assert hit.num_tokens == 24 and hit.block_ids[1][:4] == (0, 0, 0, 0)
    kv.check_integrity()
    kv.release(item)
    kv.check_integrity()
    assert kv.usage == 0


def test_reset_waits_for_requests() -> None:
    kv = manager()
    item = request("a", list(range(12)))
    fill(kv, item)
    assert not kv.reset_prefix_cache()
    kv.release(item)
    assert kv.reset_prefix_cache()
    assert kv.find_hit(request("b", list(range(12)))).num_tokens == 0


def test_sizes_of_a_model_with_two_groups() -> None:
    specs = {"l0": FULL, "l1": LOCAL, "l2": FULL}
    config = build_cache_config(specs, 100 * 2 * 512)
    assert config.num_blocks == 100
    assert [tensor.layer_names for tensor in config.tensors] == [("l0", "l1"), ("l2",)]
    assert config.size_bytes == 100 * 2 * 512
    assert capacity_tokens(config) == 49 * 4
    assert max_len_that_fits(specs, 100, 10_000) > 0
    needed = bytes_for_one_request({"a": FULL}, 40)
    assert needed == 11 * 512
    assert max_len_that_fits({"a": FULL}, 11, 1000) == 40
    assert max_concurrency(build_cache_config({"a": FULL}, needed), 40) == 1.0


@pytest.mark.parametrize("num_computed", range(25))
def test_window_keeps_exactly_the_blocks_that_later_tokens_see(num_computed: int) -> None:
    kv = manager(64, local=LOCAL)
    item = request("a", list(range(24)))
    assert kv.allocate(item, 24) is not None
    kv.commit(item, num_computed)
    # The next token, at position num_computed, sees the 5 before it.
    first = max(0, num_computed - 5) // 4
    assert [block != 0 for block in kv.block_ids("a")[0]] == [index >= first for index in range(6)]
    kv.check_integrity()


def test_window_hit_needs_all_blocks_that_the_next_token_sees() -> None:
    kv = manager(64, local=LOCAL)
    item = request("a", list(range(24)))
    assert kv.allocate(item, 24) is not None
    kv.commit(item, 24)
    kv.release(item)
    hit = kv.find_hit(request("b", list(range(25))))
    assert hit.num_tokens == 24 and [block != 0 for block in hit.block_ids[0]] == [False] * 4 + [True] * 2
    # All free blocks but the window's two are given out: still a hit. Then the later one goes: the other alone is none.
    other, third = request("c", [99]), request("d", [98])
    assert kv.allocate(other, 4 * (kv.num_free_blocks - 2)) is not None
    assert kv.find_hit(request("b", list(range(25)))).num_tokens == 24
    assert kv.allocate(third, 4) is not None
    assert kv.find_hit(request("b", list(range(25)))).num_tokens == 0


def test_equal_tokens_behind_different_ones_are_different_content() -> None:
    kv = manager()
    fill(kv, request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    fill(kv, request("b", [9, 9, 9, 9]))
    assert kv.find_hit(request("c", [9, 9, 9, 9, 5, 6, 7, 8, 0])).num_tokens == 4


def test_groups_do_not_find_each_others_blocks() -> None:
    kv = manager(64, full=FULL, other=FULL_TOO)
    fill(kv, request("a", list(range(12))))
    full, other = kv.find_hit(request("b", list(range(12)))).block_ids
    assert len(full) == len(other) == 2 and not set(full) & set(other)


def test_failed_allocation_counts_cached_blocks_that_are_free() -> None:
    kv = manager(num_blocks=5)
    item = request("a", list(range(12)))
    fill(kv, item)
    kv.release(item)
    longer = request("b", list(range(20)))
    hit = kv.find_hit(longer)
    assert hit.num_tokens == 12 and kv.num_free_blocks == 4 and hit.num_idle_blocks == 3
    assert kv.allocate(longer, 8, hit=hit) is None
    assert kv.find_hit(request("c", list(range(20)))) == hit
    assert kv.allocate(longer, 4, hit=hit) is not None
    assert kv.find_hit(request("d", list(range(20)))).num_idle_blocks == 0
    kv.check_integrity()


def test_hits_are_counted_once_a_request_and_not_after_a_preemption() -> None:
    kv = manager()
    fill(kv, request("a", list(range(12))))
    item = request("b", list(range(12)))
    for _ in range(3):
        hit = kv.find_hit(item)
    kv.allocate(item, 4, hit=hit)
    assert (kv.num_queries, kv.num_hits) == (12, 8)
    kv.release(item)
    item.num_preemptions = 1
    kv.allocate(item, 4, hit=kv.find_hit(item))
    assert (kv.num_queries, kv.num_hits) == (12, 8)


def test_caching_off_finds_nothing_and_hashes_nothing() -> None:
    kv = BlockKVManager(build_cache_config({"a": FULL}, 0, 16), enable_prefix_caching=False)
    item = request("a", list(range(12)))
    fill(kv, item)
    assert kv.find_hit(request("b", list(range(12)))).num_tokens == 0 and item.block_hashes == []


def test_blocks_for_external_tokens_come_without_content() -> None:
    kv = manager()
    item = request("a", list(range(12)))
    assert kv.allocate(item, 0, num_external_tokens=8) == [kv.block_ids("a")[0]]
    assert len(kv.block_ids("a")[0]) == 2
    assert kv.find_hit(request("b", list(range(12)))).num_tokens == 0
    item.num_computed_tokens = 8
    assert kv.allocate(item, 4) is not None
    kv.commit(item, 12)
    assert kv.find_hit(request("b", list(range(12)))).num_tokens == 8


def test_release_is_idempotent() -> None:
    kv = manager()
    item = request("a", list(range(12)))
    fill(kv, item)
    kv.release(item)
    kv.release(item)
    assert kv.usage == 0 and kv.block_ids("a") == [[]]
    kv.check_integrity()


def test_longest_context_counts_the_steps_under_way() -> None:
    groups = build_cache_config({"a": LOCAL}, 0, 16).groups
    # 5 before the token, a step, and a block that neither end fills: 4 blocks for a step of 7, 6 for one of 14.
    assert longest_context(groups, 5, 1000, max_step_tokens=7) == 1000
    assert longest_context(groups, 5, 1000, max_step_tokens=14) == 16
    assert longest_context(groups, 7, 1000, max_step_tokens=14) == 1000
    assert longest_context(groups, 1, 1000) == 0


def test_no_memory_and_no_layers_give_small_caches() -> None:
    assert build_cache_config({"a": FULL}, -5).num_blocks == 0
    config = build_cache_config({}, 1 << 40)
    assert config.num_blocks == 2 and config.size_bytes == 0 and max_concurrency(config, 10) == float("inf")


def test_unequal_pages_are_refused_with_sizes_and_layers() -> None:
    state = KVCacheSpec(**{**COMMON, "kind": CacheKind.STATE_SPACE, "page_size_bytes": 2048})
    with pytest.raises(ConfigError, match=r"512 bytes \(full_attention, l0\); 2048 bytes \(state_space, l1\)"):
        build_cache_config({"l0": FULL, "l1": state}, 1 << 20)


def test_state_space_layers_form_a_group_of_one_block_a_request() -> None:
    state = KVCacheSpec(**{**COMMON, "kind": CacheKind.STATE_SPACE})
    config = build_cache_config({"l0": FULL, "l1": state, "l2": FULL}, 0, 101)
    assert [group.layer_names for group in config.groups] == [("l0", "l2"), ("l1",)]
    assert max_concurrency(config, 36) == 10.0


def test_state_space_layers_are_refused_by_name() -> None:
    spec = KVCacheSpec(**{**COMMON, "kind": CacheKind.STATE_SPACE})
    with pytest.raises(ConfigError, match="state-space"):
        manager(8, a=spec)


def test_pool_refuses_a_double_release() -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])
