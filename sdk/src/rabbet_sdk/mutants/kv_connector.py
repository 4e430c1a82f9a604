"""KV connectors with one fault each, on top of the strict twin."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, ClassVar

import torch

from rabbet.contracts import Refusal, register_kv_connector
from rabbet.contracts.kv_connector import CacheIdentity, ConnectorQuery, ExternalHit
from rabbet.types.kv import KVCacheConfig
from rabbet.types.outputs import KVTransferResult
from rabbet.types.request import Request
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.kv_connector import StrictConnector, _Scheduler, _Worker

__all__ = ["MUTANTS"]


class _Base(StrictConnector):
    """Makes the halves that a mutant names."""

    scheduler: ClassVar[type[_Scheduler]] = _Scheduler
    worker: ClassVar[type[_Worker]] = _Worker

    @classmethod
    def make_scheduler_half(cls, query: ConnectorQuery, config: KVCacheConfig, identity: CacheIdentity) -> _Scheduler:
        """The mutant's."""
        return cls.scheduler(query.options["store"], config, identity)

    @classmethod
    def make_worker_half(cls, query: ConnectorQuery) -> _Worker:
        """The mutant's."""
        options = query.options
        return cls.worker(options["store"], options.get("clock", time.monotonic), options.get("timeout_s", 5.0))


def _plant(
    name: str, caught_by: str, story: str, *, scheduler: type[_Scheduler] = _Scheduler, worker: type[_Worker] = _Worker,
    claims: str | None = None, **more: Any,
) -> Mutant:  # fmt: skip
    """Register a class with other halves than the twin's, as an attribute of this module."""
    title = name.title().replace("_", "")
    parts = {"__module__": __name__, "__doc__": story, "scheduler": scheduler, "worker": worker, **more}
    globals()[title] = register_kv_connector(name)(type(title, (_Base,), parts))
    target = f"{__name__}:{title}"
    return Mutant(name=name, target=target, caught_by=f"test_{caught_by}", story=story, claims=claims)


class _LastTokenToo(_Scheduler):
    def find_hit(self, request: Request, num_local_tokens: int) -> ExternalHit:
        longer = replace(request, token_ids=[*request.token_ids, 0])
        return super().find_hit(longer, num_local_tokens)


class _NoSalt(_Scheduler):
    def keys(self, request: Request, num_tokens: int) -> list[str]:
        return super().keys(replace(request, spec=replace(request.spec, cache_salt=None)), num_tokens)


class _NoAdapter(_Scheduler):
    def keys(self, request: Request, num_tokens: int) -> list[str]:
        return super().keys(replace(request, spec=replace(request.spec, adapter=None)), num_tokens)


class _FromTheStart(_Scheduler):
    def on_allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        self.starts[request.request_id] = 0
        super().on_allocated(request, block_ids, num_external_tokens)


class _LooksAndLoads(_Scheduler):
    def find_hit(self, request: Request, num_local_tokens: int) -> ExternalHit:
        for key in self.keys(request, len(request.token_ids) - 1):
            self.store.get(f"{self.identity.digest}/{key}/0")
        return super().find_hit(request, num_local_tokens)


class _Repeats(_Scheduler):
    def build_transfer(self, num_scheduled_tokens: Mapping[str, int]) -> bytes:
        before = [dict(item) for item in self.saves]
        message = super().build_transfer(num_scheduled_tokens)
        self.saves = before
        return message


class _Pickles(_Scheduler):
    def build_transfer(self, num_scheduled_tokens: Mapping[str, int]) -> bytes:
        return pickle.dumps(super().build_transfer(num_scheduled_tokens))


class _Unpickles(_Worker):
    def start_step(self, transfer: bytes) -> None:
        super().start_step(pickle.loads(transfer))


class _SavesGarbage(_Scheduler):
    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self.failed.clear()
        return super().on_finished(request, block_ids)


class _KeepsForEver(_Scheduler):
    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        return True, super().on_finished(request, block_ids)[1]


class _NoChecksum(_Worker):
    def place(self, group: int, block: int, key: str, value: bytes | None) -> bool:
        if value is not None:
            size = 32 + sum(cache[block].numel() * cache.itemsize for cache in self.pages[group])
            data = value[32:].ljust(size - 32, b"\0")
            value = sha256(key.encode() + data).digest() + data
        return super().place(group, block, key, value)


class _Swallows(_Worker):
    def fail(self, request_id: str, group: int, block: int) -> None:
        """Says nothing."""


class _GroupLost(_Worker):
    def fail(self, request_id: str, group: int, block: int) -> None:
        super().fail(request_id, 0, block)


class _Waits(_Worker):
    def finish_step(self) -> KVTransferResult:
        self.deadlines = dict.fromkeys(self.deadlines, float("inf"))
        return super().finish_step()


class _WritesLate(_Worker):
    def finish_step(self) -> KVTransferResult:
        before = dict(self.tickets)
        result = super().finish_step()
        late = {ticket: item for ticket, item in before.items() if ticket not in self.tickets}
        if result.failed_block_ids:
            self.late = {**getattr(self, "late", {}), **late}
        return result

    def start_step(self, transfer: bytes) -> None:
        self.tickets.update(self.__dict__.pop("late", {}))
        super().start_step(transfer)


class _EndsTwice(_Worker):
    def finish_step(self) -> KVTransferResult:
        result = super().finish_step()
        again = self.__dict__.pop("again", [])
        self.again = list(result.finished_loading)
        return replace(result, finished_loading=[*result.finished_loading, *again])


class _Contiguous(_Worker):
    def put(self, group: int, block: int, key: str) -> None:
        """Reads storage as if blocks stood side by side."""
        kept, views = self.pages, []
        for cache in self.pages[group]:
            views.append(torch.as_strided(cache, cache.shape, (cache[0].numel(), *cache.stride()[1:])))
        self.pages = [*kept[:group], views, *kept[group + 1 :]]
        super().put(group, block, key)
        self.pages = kept


class _FirstGroup(_Worker):
    def place(self, group: int, block: int, key: str, value: bytes | None) -> bool:
        return super().place(group, block, key, value) if group == 0 else True


class _AnyModel(_Scheduler):
    def __init__(self, store: Any, config: KVCacheConfig, identity: CacheIdentity) -> None:
        super().__init__(store, config, replace(identity, digest="kv"))


class _AnyModelWorker(_Worker):
    def register(self, caches: Mapping[str, torch.Tensor], config: KVCacheConfig, identity: CacheIdentity) -> None:
        super().register(caches, config, replace(identity, digest="kv"))


class _Raises(_Worker):
    def fetch(self, request_id: str, group: int, block: int, key: str) -> None:
        self.tickets[self.store.get(key)] = (request_id, group, block, key)


class _Forgets(_Worker):
    def close(self) -> None:
        self.store.entries.clear()


def _accepts_all(_cls: Any, _query: ConnectorQuery) -> tuple[Refusal, ...]:
    return ()


MUTANTS = (
    _plant("last_token_too", "hit_leaves_the_last_token_and_starts_after_the_local_one",
           "the whole prompt is a hit, and nothing is left to sample from", scheduler=_LastTokenToo),
    _plant("salt_ignored", "salts_and_adapters_never_cross", "one tenant reads another's cache", scheduler=_NoSalt),
    _plant("adapter_ignored", "salts_and_adapters_never_cross", "KV of another LoRA", scheduler=_NoAdapter),
    _plant("local_hit_overwritten", "load_starts_after_the_local_hit", "loads into blocks that others read",
           scheduler=_FromTheStart),
    _plant("lookup_loads", "find_hit_has_no_effect", "a question moves data", scheduler=_LooksAndLoads),
    _plant("saves_again", "transfers_are_told_once", "the message of a step comes again", scheduler=_Repeats),
    _plant("pickled_message", "halves_exchange_data_only", "objects cross processes", scheduler=_Pickles,
           worker=_Unpickles),
    _plant("saves_failed_blocks", "failed_blocks_are_not_saved", "garbage gets a valid checksum",
           scheduler=_SavesGarbage),
    _plant("blocks_kept_for_ever", "abort_while_loading_ends_the_load_once", "blocks of an aborted request leak",
           scheduler=_KeepsForEver),
    _plant("no_checksum", "faults_while_loading_cost_the_hit_only", "cut and bent bytes are taken for KV",
           worker=_NoChecksum),
    _plant("error_swallowed", "faults_while_loading_cost_the_hit_only", "a failed load counts as done",
           worker=_Swallows),
    _plant("group_lost", "faults_while_loading_cost_the_hit_only", "failed blocks without their cache group",
           worker=_GroupLost),
    _plant("waits_for_ever", "nothing_waits_beyond_the_deadline", "a request waits for a store that hangs",
           worker=_Waits),
    _plant("writes_late", "late_answers_write_nothing", "an answer after the deadline hits another's block",
           worker=_WritesLate),
    _plant("load_ends_twice", "transfers_are_told_once", "a load is reported again in the next step",
           worker=_EndsTwice),
    _plant("stride_ignored", "blocks_come_back_bit_by_bit", "LMCache#4463: blocks that do not stand side by side",
           worker=_Contiguous),
    _plant("first_group_only", "blocks_come_back_bit_by_bit", "hybrid models have more than one group",
           worker=_FirstGroup),
    _plant("any_model", "engines_that_differ_share_nothing_wrong", "keys without the identity of the cache",
           scheduler=_AnyModel, worker=_AnyModelWorker),
    _plant("store_error_raised", "faults_while_loading_cost_the_hit_only", "a reset connection ends the engine's step",
           worker=_Raises),
    _plant("close_empties_the_store", "build_use_close_twice_and_share_no_state", "one engine closes for all",
           worker=_Forgets),
    _plant("claims_too_little", "supports_is_honest", "accepts devices that it does not claim",
           supports=classmethod(_accepts_all)),
    _plant("claims_too_much", "supports_is_honest", "claims a device that it refuses",
           claims='device = ["cpu", "cuda"]\nrole = ["kv_both"]'),
)  # fmt: skip
