"""A KV connector that keeps blocks of finished requests in a store of bytes and loads them for later ones.

    key    sha256 over identity, salt, adapter and all tokens up to the end of the block, then the cache group
    value  sha256 over key and pages (32 bytes), then the block's page of each layer of the group

Loads are asynchronous: a request waits until all its blocks are there, have failed, or are late.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from rabbet.contracts import Refusal, register_kv_connector
from rabbet.contracts.kv_connector import (
    CacheIdentity,
    ConnectorQuery,
    ConnectorScheduler,
    ConnectorWorker,
    ExternalHit,
    KVConnector,
)  # fmt: skip
from rabbet.types.kv import KVCacheConfig
from rabbet.types.outputs import KVTransferResult
from rabbet.types.request import Request
from rabbet_sdk.strict import seal

__all__ = ["StrictConnector"]

_OPTIONS = ("store", "clock", "timeout_s")
_CHECKSUM_BYTES = 32


class _Scheduler(ConnectorScheduler):
    """Knows tokens and block ids, never the cache."""

    def __init__(self, store: Any, config: KVCacheConfig, identity: CacheIdentity) -> None:
        self.store, self.identity = store, identity
        self.num_groups, self.block_size = len(config.groups), config.groups[0].spec.block_size
        self.starts: dict[str, int] = {}
        self.loading: set[str] = set()
        self.failed: set[str] = set()
        self.loads: list[dict[str, Any]] = []
        self.saves: list[dict[str, Any]] = []

    def keys(self, request: Request, num_tokens: int) -> list[str]:
        """One key for each full block of the first ``num_tokens``."""
        digest, found = sha256(json.dumps([request.spec.cache_salt, request.spec.adapter]).encode()).digest(), []
        for end in range(self.block_size, num_tokens + 1, self.block_size):
            tokens = request.token_ids[end - self.block_size : end]
            digest = sha256(digest + json.dumps(tokens).encode()).digest()
            found.append(digest.hex())
        return found

    def is_stored(self, key: str) -> bool:
        """Whether every group has the block."""
        return all(self.store.contains(f"{self.identity.digest}/{key}/{group}") for group in range(self.num_groups))

    def find_hit(self, request: Request, num_local_tokens: int) -> ExternalHit:
        """Blocks that are stored without a gap; the last token is computed here in any case."""
        self.starts[request.request_id] = num_local_tokens // self.block_size
        count = 0
        try:
            for key in self.keys(request, len(request.token_ids) - 1)[num_local_tokens // self.block_size :]:
                if not self.is_stored(key):
                    break
                count += 1
        except ConnectionError:
            count = 0
        return ExternalHit(num_tokens=count * self.block_size, is_async=True)

    def on_allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """Goes to the worker half with the next step."""
        start = self.starts[request.request_id]
        end = start + num_external_tokens // self.block_size
        keys = self.keys(request, end * self.block_size)[start:]
        blocks = [list(ids[start:end]) for ids in block_ids]
        self.loads.append({"id": request.request_id, "keys": keys, "blocks": blocks})
        self.loading.add(request.request_id)

    def build_transfer(self, num_scheduled_tokens: Mapping[str, int]) -> bytes:
        """JSON: it can hold nothing but data."""
        message = json.dumps({"loads": self.loads, "saves": self.saves}).encode()
        self.loads, self.saves = [], []
        return message

    def on_result(self, result: KVTransferResult) -> None:
        """Remember failures: such blocks must not be saved."""
        self.failed.update(result.failed_block_ids)
        self.loading.difference_update(result.finished_loading)

    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Save full blocks that are computed; blocks left of a sliding window (null blocks) are gone."""
        self.starts.pop(request.request_id, None)
        is_bad = request.request_id in self.failed or request.request_id in self.loading
        self.failed.discard(request.request_id)
        keys = self.keys(request, min(request.num_computed_tokens, len(request.token_ids)))
        if is_bad or not keys:
            return False, None
        blocks = [list(ids[: len(keys)]) for ids in block_ids]
        self.saves.append({"id": request.request_id, "keys": keys, "blocks": blocks})
        return True, None


class _Worker(ConnectorWorker):
    """Knows the cache and the store, never a request."""

    def __init__(self, store: Any, clock: Any, timeout_s: float) -> None:
        self.store, self.clock, self.timeout_s = store, clock, timeout_s
        self.pages: list[list[torch.Tensor]] = []
        self.prefix = ""
        self.tickets: dict[int, tuple[str, int, int, str]] = {}
        self.deadlines: dict[str, float] = {}
        self.failed: dict[str, list[list[int]]] = {}
        self.saved: list[str] = []

    def register(self, caches: Mapping[str, torch.Tensor], config: KVCacheConfig, identity: CacheIdentity) -> None:
        """Axis 0 of each tensor is the block."""
        self.pages = [[caches[name] for name in group.layer_names] for group in config.groups]
        self.prefix = identity.digest

    def start_step(self, transfer: bytes) -> None:
        """Ask for what is to be loaded; copy out what is to be saved."""
        message = json.loads(transfer)
        for load in message["loads"]:
            self.deadlines[load["id"]] = self.clock() + self.timeout_s
            for group, blocks in enumerate(load["blocks"]):
                for key, block in zip(load["keys"], blocks, strict=True):
                    self.fetch(load["id"], group, block, f"{self.prefix}/{key}/{group}")
        for save in message["saves"]:
            for group, blocks in enumerate(save["blocks"]):
                for key, block in zip(save["keys"], blocks, strict=True):
                    if block:
                        self.put(group, block, f"{self.prefix}/{key}/{group}")
            # The bytes are copied, so the blocks are free, whatever the store makes of them.
            self.saved.append(save["id"])

    def fetch(self, request_id: str, group: int, block: int, key: str) -> None:
        """Ask for one block of one group."""
        try:
            self.tickets[self.store.get(key)] = (request_id, group, block, key)
        except ConnectionError:
            self.fail(request_id, group, block)

    def put(self, group: int, block: int, key: str) -> None:
        """Store one block of one group; a store that cannot costs a later hit and nothing else."""
        pages = [cache[block].contiguous().reshape(-1).view(torch.uint8) for cache in self.pages[group]]
        data = b"".join(page.cpu().numpy().tobytes() for page in pages)
        try:
            self.store.put(key, sha256(key.encode() + data).digest() + data)
        except ConnectionError:
            return

    def fail(self, request_id: str, group: int, block: int) -> None:
        """Remember a block without valid data."""
        self.failed.setdefault(request_id, [[] for _ in self.pages])[group].append(block)

    def place(self, group: int, block: int, key: str, value: bytes | None) -> bool:
        """Write a block's pages if they are what was saved under ``key``."""
        data = (value or b"")[_CHECKSUM_BYTES:]
        if value is None or value[:_CHECKSUM_BYTES] != sha256(key.encode() + data).digest():
            return False
        start = 0
        for cache in self.pages[group]:
            size = cache[block].numel() * cache.itemsize
            page = torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)
            cache[block].copy_(page.view(cache.dtype).reshape(cache[block].shape))
            start += size
        return True

    def finish_step(self) -> KVTransferResult:
        """Take what has come; give up what is late, so that no request waits for ever."""
        for ticket, value in self.store.poll():
            # Answers that come twice, or after the deadline, belong to nobody: their blocks may be another's by now.
            found = self.tickets.pop(ticket, None)
            if found is not None and not self.place(found[1], found[2], found[3], value):
                self.fail(*found[:3])
        late = {request_id for request_id, deadline in self.deadlines.items() if self.clock() >= deadline}
        for ticket, (request_id, group, block, _) in list(self.tickets.items()):
            if request_id in late:
                del self.tickets[ticket]
                self.fail(request_id, group, block)
        waiting = {request_id for request_id, *_ in self.tickets.values()}
        done = [request_id for request_id in self.deadlines if request_id not in waiting]
        failed = {request_id: self.failed.pop(request_id) for request_id in done if request_id in self.failed}
        for request_id in done:
            del self.deadlines[request_id]
        saved, self.saved = self.saved, []
        return KVTransferResult(finished_loading=done, finished_saving=saved, failed_block_ids=failed)

    def close(self) -> None:
        """Let go of the cache."""
        self.pages = []
        self.tickets.clear()


@register_kv_connector("strict")
@seal
class StrictConnector(KVConnector):
    """Options: ``store`` (an object with ``contains``, ``put``, ``get``, ``poll``), ``clock``, ``timeout_s``."""

    @classmethod
    def supports(cls, query: ConnectorQuery) -> tuple[Refusal, ...]:
        """Reads and writes from the CPU's memory, and needs a store."""
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"copies on cpu, not on {query.device_type}"))
        if query.role != "kv_both":
            refusals.append(Refusal(code="ROLE", message=f"role is {query.role}; possible: kv_both"))
        unknown = sorted(set(query.options) - set(_OPTIONS))
        if unknown or "store" not in query.options:
            message = f"option {unknown[0]} is unknown" if unknown else "option store is missing"
            refusals.append(Refusal(code="OPTIONS", message=f"{message}; possible: {', '.join(_OPTIONS)}"))
        return tuple(refusals)

    @classmethod
    def make_scheduler_half(
        cls, query: ConnectorQuery, config: KVCacheConfig, identity: CacheIdentity
    ) -> ConnectorScheduler:
        """In the engine process."""
        return _Scheduler(query.options["store"], config, identity)

    @classmethod
    def make_worker_half(cls, query: ConnectorQuery) -> ConnectorWorker:
        """On each rank."""
        options = query.options
        return _Worker(options["store"], options.get("clock", time.monotonic), options.get("timeout_s", 5.0))
