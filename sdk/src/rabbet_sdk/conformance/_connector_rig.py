"""An engine around a KV connector: blocks, requests and steps as core has them, and a cache that is watched bit by bit.

What a block must hold follows from its layer and from all tokens before its end (with salt and adapter), as keys and
values do. Blocks that nobody owns are filled with poison when they are freed, so that a late write or a late read shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from rabbet.contracts.attention import KVLayout
from rabbet.contracts.kv_connector import CacheIdentity, ConnectorQuery, ConnectorScheduler, ConnectorWorker
from rabbet.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor
from rabbet.types.outputs import KVTransferResult
from rabbet.types.request import EngineRequest, Request
from rabbet.types.sampling import SamplingParams
from rabbet_sdk.fakes.clock import FakeClock
from rabbet_sdk.fakes.kv_store import FaultyStore

__all__ = ["LAYOUTS", "Engine", "Live", "Setup"]

HEADS, DIM = 2, 3
LAYOUTS = {"nhd-1": ("kv", "slot", "head", "dim"), "hnd-1": ("kv", "head", "slot", "dim")}
_POISON = 0x7FC0BEEF
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The shape of one engine's cache."""

    layout: str = "nhd-1"
    block_size: int = 4
    is_strided: bool = False
    num_groups: int = 2
    tensor_parallel_size: int = 1
    rank: int = 0
    model: str = "tiny@1"
    num_blocks: int = 48

    def config(self) -> KVCacheConfig:
        """Groups of two layers each."""
        size = 2 * self.block_size * (HEADS // self.tensor_parallel_size) * DIM * 4
        spec = KVCacheSpec(
            block_size=self.block_size, num_kv_heads=HEADS // self.tensor_parallel_size, head_dim=DIM, head_dim_v=DIM,
            dtype="float32", page_size_bytes=size,
        )  # fmt: skip
        names = [(f"layers.{2 * g}", f"layers.{2 * g + 1}") for g in range(self.num_groups)]
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            groups=tuple(KVCacheGroup(group_id=g, spec=spec, layer_names=n) for g, n in enumerate(names)),
            tensors=tuple(
                KVCacheTensor(size_bytes=size * self.num_blocks, layer_names=(n,)) for two in names for n in two
            ),
        )

    def identity(self) -> CacheIdentity:
        """As core makes it."""
        sizes = {"kv": 2, "slot": self.block_size, "head": HEADS // self.tensor_parallel_size, "dim": DIM}
        axes = LAYOUTS[self.layout]
        layout = KVLayout(name=self.layout, axes=axes, shape=tuple(sizes[axis] for axis in axes), dtype="float32")
        facts = (self.model, self.layout, self.block_size, self.num_groups, self.tensor_parallel_size, self.rank)
        return CacheIdentity(
            model=self.model, layouts=(layout,) * self.num_groups, block_sizes=(self.block_size,) * self.num_groups,
            dtype="float32", tensor_parallel_size=self.tensor_parallel_size, rank=self.rank, digest=repr(facts),
        )  # fmt: skip

    def cache(self) -> torch.Tensor:
        """One layer's tensor, full of poison; pages contiguous, blocks maybe apart."""
        shape = self.identity().layouts[0].shape
        gap = 2 if self.is_strided else 1
        whole = torch.full((self.num_blocks * gap, *shape), _POISON, dtype=torch.int32).view(torch.float32)
        return whole[::gap]

    def truth(self, layer: str, known: Sequence[Any], start: int) -> torch.Tensor:
        """The page of the block at token ``start``; ``known`` is salt, adapter and all tokens up to its end."""
        page = torch.empty(self.identity().layouts[0].shape, dtype=torch.int32)
        width, axes = HEADS // self.tensor_parallel_size, LAYOUTS[self.layout]
        for slot in range(self.block_size):
            upto = [*known[:2], *known[2 : 2 + start + slot + 1]]
            seed = zlib.crc32(repr((layer, upto)).encode())
            values = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (2, HEADS, DIM), dtype=np.int32)
            part = torch.from_numpy(values[:, self.rank * width : (self.rank + 1) * width])
            page.select(axes.index("slot"), slot).copy_(part)
        return page


@dataclass(slots=True)
class Live:
    """A request and what happened to it."""

    request: Request
    tables: list[list[int]]
    num_external: int = 0
    start: int = 0
    is_loading: bool = False
    is_saving: bool = False
    is_ended: bool = False
    is_failed: bool = False
    since_s: float = 0.0
    failed: list[set[int]] = field(default_factory=list)


class Engine:
    """One engine with both halves of a connector, on a store and a clock that tests share.

    Attributes:
        store, clock: Shared with the test.
        live: Requests whose blocks are in use, by id.
        failures: Ids of requests whose load failed.
        loaded: For each request its tokens that were loaded well.
    """

    def __init__(
        self,
        plugin_class: type[Any],
        options: Callable[[FaultyStore, FakeClock], Mapping[str, Any]],
        store: FaultyStore,
        clock: FakeClock,
        deadline_s: float,
        setup: Setup | None = None,
        *,
        role: str = "kv_both",
    ) -> None:
        self.setup = setup or Setup()
        self.store, self.clock, self.deadline_s = store, clock, deadline_s
        self.config = self.setup.config()
        query = ConnectorQuery(
            role=role, device_type="cpu", num_groups=self.setup.num_groups,
            layout_names=(self.setup.layout,) * self.setup.num_groups, options=options(store, clock),
        )  # fmt: skip
        identity = self.setup.identity()
        self.scheduler: ConnectorScheduler = plugin_class.make_scheduler_half(query, self.config, identity)
        self.worker: ConnectorWorker = plugin_class.make_worker_half(query)
        self.caches = {name: self.setup.cache() for group in self.config.groups for name in group.layer_names}
        self.shadow = {name: cache.view(torch.int32).clone() for name, cache in self.caches.items()}
        self.worker.register(self.caches, self.config, identity)
        self.free = list(range(1, self.setup.num_blocks))
        self.live: dict[str, Live] = {}
        self.failures: list[str] = []
        self.loaded: dict[str, int] = {}

    # ---- what a scheduler does

    def request(self, name: str, prompt: Sequence[int], salt: str | None = None, adapter: str | None = None) -> Request:
        """A request that is not known to anyone yet."""
        spec = EngineRequest(
            request_id=name, prompt_token_ids=list(prompt), sampling=SamplingParams(temperature=0.0), max_tokens=4,
            cache_salt=salt, adapter=adapter,
        )  # fmt: skip
        return Request(spec=spec, token_ids=list(prompt), seed=0)

    def look(self, request: Request, num_local: int = 0) -> tuple[int, bool]:
        """The hit, asked for twice; None is asked again until the deadline is over."""
        started = self.clock()
        while True:
            hit, again = (self.scheduler.find_hit(request, num_local) for _ in range(2))
            if hit.num_tokens is not None:
                break
            assert self.clock() - started <= self.deadline_s + 2, "find_hit never knows the hit"
            self.step()
        assert again.num_tokens is None or hit == again, f"find_hit says {hit}, asked again {again}"
        count, size = hit.num_tokens, self.setup.block_size
        assert count >= 0 and count % size == 0, f"a hit of {count} tokens is no multiple of the block size {size}"
        most = len(request.token_ids) - 1 - num_local
        assert count <= max(0, most), f"a hit of {count} of {len(request.token_ids)} tokens: the last is computed anew"
        return count, hit.is_async

    def admit(self, request: Request, num_local: int = 0) -> Live:
        """Look up, allocate, load: as the scheduler does with a request that waits. ``num_local`` tokens are here."""
        count, is_async = self.look(request, num_local)
        blocks = -(-(len(request.token_ids) + 1) // self.setup.block_size)
        live = Live(request, [self._take(blocks) for _ in self.config.groups], since_s=self.clock())
        live.failed = [set() for _ in self.config.groups]
        self.live[request.request_id] = live
        self._compute(live, 0, num_local)
        live.start, live.num_external = num_local, count
        if count:
            self.scheduler.on_allocated(request, [list(table) for table in live.tables], count)
            live.is_loading = True
        if not (count and is_async):
            request.num_computed_tokens = num_local + count
        return live

    def step(self, *names: str, seconds: float = 1.0) -> KVTransferResult:
        """One step in which the requests ``names`` compute all their tokens; time passes."""
        counts = {n: len(self.live[n].request.token_ids) - self.live[n].request.num_computed_tokens for n in names}
        transfer = self.scheduler.build_transfer(counts)
        assert isinstance(transfer, bytes), f"the message of a step is {type(transfer).__name__}, not bytes"
        assert not transfer.startswith(_PICKLES), "the message of a step is a pickle; pass data only"
        self.worker.start_step(bytes(transfer))
        for group in self.config.groups:
            for layer in group.layer_names:
                self.worker.wait_for_layer(layer)
        for name, count in counts.items():
            live = self.live[name]
            self._compute(live, live.request.num_computed_tokens, live.request.num_computed_tokens + count)
            live.request.num_computed_tokens += count
        for layer in self.caches:
            self.worker.save_layer(layer)
        result = msgspec.msgpack.decode(msgspec.msgpack.encode(self.worker.finish_step()), type=KVTransferResult)
        self.scheduler.on_result(result)
        self._take_in(result)
        self.clock.advance(seconds)
        self._watch()
        return result

    def settle(self) -> None:
        """Steps until no transfer is under way; fails if one takes longer than the deadline."""
        while any(live.is_loading or live.is_saving for live in self.live.values()):
            self.step()

    def run(self, name: str, prompt: Sequence[int], salt: str | None = None, adapter: str | None = None) -> int:
        """A whole request, alone; returns the tokens that were loaded. A failed load is computed anew."""
        live = self.admit(self.request(name, prompt, salt, adapter))
        self.settle()
        if live.is_failed:
            live.request.num_computed_tokens = 0
        self.step(name)
        self.finish(name)
        self.settle()
        return self.loaded.get(name, 0)

    def finish(self, name: str) -> None:
        """The request ended, or was aborted."""
        live = self.live[name]
        live.is_ended, live.since_s = True, self.clock()
        answer = self.scheduler.on_finished(live.request, [list(table) for table in live.tables])
        keeps, params = answer
        assert isinstance(keeps, bool) and (params is None or msgspec.msgpack.encode(params)), f"on_finished: {answer}"
        live.is_saving = keeps
        self._let_go(live)

    def preempt(self, name: str) -> Request:
        """Its blocks are taken away without a word to the connector; it waits again."""
        live = self.live.pop(name)
        self._release(live)
        live.request.num_computed_tokens = 0
        return live.request

    def close(self) -> None:
        """Both halves, twice; afterwards nothing may be written."""
        for half in (self.scheduler, self.worker) * 2:
            half.close()
        self._watch()

    # ---- what a cache holds

    def _known(self, live: Live) -> list[Any]:
        spec = live.request.spec
        return [spec.cache_salt, spec.adapter, *live.request.token_ids]

    def _compute(self, live: Live, start: int, end: int) -> None:
        size, known = self.setup.block_size, self._known(live)
        for group, table in zip(self.config.groups, live.tables, strict=True):
            for index in range(start // size, -(-end // size)):
                for layer in group.layer_names:
                    self._set(layer, table[index], self.setup.truth(layer, known, index * size))

    def _set(self, layer: str, block: int, page: torch.Tensor) -> None:
        self.caches[layer].view(torch.int32)[block].copy_(page)
        self.shadow[layer][block].copy_(page)

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the test needs a bigger pool"
        return taken

    def _release(self, live: Live) -> None:
        for group, table in zip(self.config.groups, live.tables, strict=True):
            for block in table:
                for layer in group.layer_names:
                    self._set(layer, block, torch.full_like(self.shadow[layer][block], _POISON))
            # Freed last, used first: a late write hits somebody at once.
            self.free = [*table, *self.free]
        live.tables = [[] for _ in live.tables]

    def _let_go(self, live: Live) -> None:
        if live.is_ended and not live.is_loading and not live.is_saving:
            self._release(live)
            del self.live[live.request.request_id]

    def _take_in(self, result: KVTransferResult) -> None:
        for name, groups in result.failed_block_ids.items():
            assert name in self.live and self.live[name].is_loading, f"a failed load of {name}, which loads nothing"
            live = self.live[name]
            assert len(groups) == len(live.tables), (
                f"failed blocks of {len(groups)} groups; there are {len(live.tables)}"
            )
            for group, (table, ids) in enumerate(zip(live.tables, groups, strict=True)):
                strange = sorted(set(ids) - set(table))
                assert not strange, f"failed blocks {strange} are none of {name}'s in group {group}"
                live.failed[group] |= set(ids)
        assert len(set(result.finished_loading)) == len(result.finished_loading), "a load ends twice in one report"
        done = list(result.finished_loading)
        done += [n for n, live in self.live.items() if live.is_loading and live.request.num_computed_tokens]
        for name in done:
            assert name in self.live and self.live[name].is_loading, f"the load of {name} ended, but none is under way"
            self._end_load(self.live[name])
        for name in result.finished_saving:
            live_or_none = self.live.get(name)
            assert live_or_none is not None and live_or_none.is_saving, (
                f"the save of {name} ended twice, or never began"
            )
            live_or_none.is_saving = False
            self._let_go(live_or_none)

    def _end_load(self, live: Live) -> None:
        name, size, known = live.request.request_id, self.setup.block_size, self._known(live)
        for group, table in zip(self.config.groups, live.tables, strict=True):
            for index in range(live.start // size, (live.start + live.num_external) // size):
                block = table[index]
                for layer in group.layer_names:
                    got = self.caches[layer].view(torch.int32)[block]
                    if block not in live.failed[group.group_id]:
                        same = torch.equal(got, self.setup.truth(layer, known, index * size))
                        assert same, (
                            f"block {index} of {name}, group {group.group_id}, {layer}: wrong, and not reported"
                        )
                    self.shadow[layer][block].copy_(got)
        live.is_loading, live.is_failed = False, any(live.failed)
        if live.is_failed:
            self.failures.append(name)
        else:
            self.loaded[name] = live.num_external
            live.request.num_computed_tokens = max(live.request.num_computed_tokens, live.start + live.num_external)
        self._let_go(live)

    def _watch(self) -> None:
        """Nothing but blocks that are being loaded may have changed, and nothing may be late."""
        open_blocks = set()
        for name, live in self.live.items():
            if live.is_loading:
                size = self.setup.block_size
                span = slice(live.start // size, (live.start + live.num_external) // size)
                open_blocks |= {block for table in live.tables for block in table[span]}
            if live.is_loading or live.is_saving:
                waited = self.clock() - live.since_s
                what = "loads" if live.is_loading else "keeps its blocks"
                assert waited <= self.deadline_s + 2, (
                    f"{name} {what} since {waited} s; the deadline is {self.deadline_s}"
                )
        for layer, cache in self.caches.items():
            differing = (cache.view(torch.int32) != self.shadow[layer]).flatten(1).any(1)
            changed = set(torch.nonzero(differing).flatten().tolist())
            assert not changed - open_blocks, f"{layer}: blocks {sorted(changed - open_blocks)} were written by nobody"
