"""A runner without a model that checks every plan against a cache kept slot by slot, a KV connector with faults, a loop."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rabbet.contracts.kv_connector import ConnectorScheduler, ExternalHit
from rabbet.contracts.scheduler import Scheduler, SchedulerContext
from rabbet.kv.groups import build_cache_config
from rabbet.kv.manager import BlockKVManager
from rabbet.sched.scheduler import FcfsScheduler, PriorityScheduler
from rabbet.types.kv import CacheKind, KVCacheSpec
from rabbet.types.outputs import FinishReason, KVTransferResult, RequestDelta, StepResult
from rabbet.types.plan import StepPlan
from rabbet.types.request import EngineRequest, Request
from rabbet.types.sampling import SamplingParams

BLOCK = 4
MAX_LEN = 48
EOS = 7
GREEDY = SamplingParams(temperature=0.0)
VOCABULARY = 50
GARBAGE = 999

Slot = tuple[int, int, int]


def chain(value: int, token: int) -> int:
    """What a slot holds: a digest of its token and of all before it, as keys and values depend on all of them."""
    return (value * 1_000_003 + token + 1) % (1 << 61)


def digests(tokens: Sequence[int]) -> list[int]:
    found, value = [], 17
    for token in tokens:
        value = chain(value, token)
        found.append(value)
    return found


def next_token(tokens: Sequence[int]) -> int:
    """The model: the next token is a function of all tokens before it."""
    return digests(tokens)[-1] % 65537 % VOCABULARY


def reference(prompt: Sequence[int], max_tokens: int, max_len: int = MAX_LEN) -> tuple[list[int], FinishReason]:
    """What a request gives alone."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        out = tokens[len(prompt) :]
        if out[-1] == EOS:
            return out, FinishReason.STOP
        if len(out) >= max_tokens or len(tokens) >= max_len:
            return out, FinishReason.LENGTH


@dataclass
class Load:
    """A load or save that the worker half carries out."""

    request_id: str
    blocks: list[list[int]]
    tokens: list[int]
    start: int
    end: int
    is_async: bool
    is_failing: bool


class FakeConnector(ConnectorScheduler):
    """Offers a random part of each prompt, sometimes late, sometimes broken, and keeps blocks of ended requests."""

    def __init__(self, seed: int, *, faults: float = 0.0, raises: bool = False) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.raises = raises
        self.offers: dict[str, ExternalHit] = {}
        self.queue: list[Load] = []
        self.loading: set[str] = set()
        self.num_loads = 0
        self.num_failures = 0
        self.ended: list[str] = []

    def find_hit(self, request: Request, num_local_tokens: int) -> ExternalHit:
        if self.raises and self.rng.random() < 0.1:
            raise RuntimeError("lookup failed")
        if self.rng.random() < 0.2:
            return ExternalHit(num_tokens=None)
        blocks = self.rng.randrange(0, request.num_known_tokens // BLOCK + 1)
        offer = ExternalHit(num_tokens=blocks * BLOCK, is_async=self.rng.random() < 0.5)
        self.offers[request.request_id] = offer
        return offer

    def on_allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        if self.raises and self.rng.random() < 0.1:
            raise RuntimeError("no room")
        assert num_external_tokens % BLOCK == 0
        offer = self.offers[request.request_id]
        # The end of the load: all blocks that are held, less those for tokens of this step.
        end = (request.num_known_tokens - 1) // BLOCK * BLOCK
        held = len(block_ids[0]) * BLOCK
        self.num_loads += 1
        if offer.is_async:
            self.loading.add(request.request_id)
        self.queue.append(
            Load(
                request.request_id, [list(blocks) for blocks in block_ids], list(request.token_ids), -1,
                min(end, held), offer.is_async, self.rng.random() < self.faults,
            )
        )  # fmt: skip
        self.queue[-1].start = num_external_tokens

    def build_transfer(self, num_scheduled_tokens: Mapping[str, int]) -> bytes:
        queue, self.queue = self.queue, []
        return json.dumps([vars(load) for load in queue]).encode()

    def on_result(self, result: KVTransferResult) -> None:
        self.loading.difference_update(result.finished_loading)
        self.num_failures += sum(1 for blocks in result.failed_block_ids.values() if any(blocks))

    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        if self.raises and self.rng.random() < 0.1:
            raise RuntimeError("too late")
        self.ended.append(request.request_id)
        # What its own load still writes is not worth saving.
        is_kept = self.rng.random() < 0.3 and any(block_ids) and request.request_id not in self.loading
        if is_kept:
            self.queue.append(Load(request.request_id, [list(b) for b in block_ids], [], 0, 0, True, False))
        return is_kept, {"id": request.request_id}


@dataclass
class FakeRunner:
    """Executes plans as the real runner does, and checks each of them."""

    windows: tuple[int | None, ...]
    max_num_seqs: int
    max_len: int = MAX_LEN
    num_drafts: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    rows: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    cache: dict[Slot, tuple[int, int]] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    saves: list[tuple[Load, dict[Slot, tuple[int, int] | None]]] = field(default_factory=list)
    poisoned: set[str] = field(default_factory=set)
    last_step: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self.last_step + 1, "steps are not in order"
        self.last_step = plan.step_id
        computed = self._take_rows(plan)
        started = self._start_loads(plan, computed)
        sampled: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        written: dict[Slot, str] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            assert count > 0
            tokens = self._compute(plan, request_id, computed[request_id], count, written)
            if tokens:
                sampled[request_id] = tokens
                if self.num_drafts:
                    drafts[request_id] = self._propose(request_id)
        transfer = self._finish_transfers(started) if plan.kv_transfer is not None else None
        return StepResult(step_id=plan.step_id, sampled_token_ids=sampled, draft_token_ids=drafts, kv_transfer=transfer)

    def _take_rows(self, plan: StepPlan) -> dict[str, int]:
        for request_id in plan.finished_request_ids:
            self.rows.pop(request_id)
            self.tables.pop(request_id)
            self.poisoned.discard(request_id)
        computed: dict[str, int] = {}
        for new in plan.new_requests:
            assert new.request_id not in self.rows, "a row is made twice"
            self.rows[new.request_id] = list(new.token_ids)
            self.tables[new.request_id] = [list(blocks) for blocks in new.block_ids]
            computed[new.request_id] = new.num_computed_tokens
        assert len(self.rows) <= self.max_num_seqs, "there are more rows than slots"
        for running in plan.running_requests:
            assert running.request_id not in computed, "a request is scheduled twice"
            for table, blocks in zip(self.tables[running.request_id], running.new_block_ids, strict=True):
                table.extend(blocks)
            computed[running.request_id] = running.num_computed_tokens
        assert set(computed) == set(plan.num_scheduled_tokens), "scheduled requests and rows differ"
        return computed

    def _compute(self, plan: StepPlan, request_id: str, start: int, count: int, written: dict[Slot, str]) -> list[int]:
        known = self.rows[request_id]
        drafts = plan.draft_token_ids.get(request_id, [])
        tokens = [*known, *drafts]
        end = start + count
        assert start < len(known) and end <= len(tokens), "tokens are scheduled that the row does not know"
        assert end <= self.max_len, "a position lies past the context"
        assert not drafts or end == len(tokens), "drafts are not the last scheduled tokens"
        values = digests(tokens)
        for group, table in enumerate(self.tables[request_id]):
            assert len(table) * BLOCK >= end, "a token has no block"
            for position in range(start, end):
                block = table[position // BLOCK]
                assert block != 0, "the null block is written"
                slot = (group, block, position % BLOCK)
                assert written.setdefault(slot, request_id) == request_id, "two requests write one block"
                # A block belongs to one group at a time: writing it ends what another group had there.
                for other in range(len(self.windows)):
                    self.cache.pop((other, block, position % BLOCK), None)
                self.cache[slot] = (position, values[position])
            window = self.windows[group]
            if request_id in self.poisoned:
                continue
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                seen = self.cache.get((group, table[position // BLOCK], position % BLOCK))
                wanted = (position, values[position])
                assert seen == wanted, f"group {group}: the block of position {position} holds other content"
        if end < len(tokens):
            return []
        if request_id in self.poisoned:
            # It has read what a failed load left; whoever lets this token through is found out.
            known.append(GARBAGE)
            return [GARBAGE]
        accepted = []
        for draft in [*drafts, None]:
            accepted.append(next_token(known))
            known.append(accepted[-1])
            if accepted[-1] != draft:
                break
        return accepted

    def _propose(self, request_id: str) -> list[int]:
        tokens = list(self.rows[request_id])
        drafts = []
        for _ in range(self.rng.randint(0, self.num_drafts)):
            drafts.append(next_token(tokens) if self.rng.random() < 0.7 else self.rng.randrange(VOCABULARY))
            tokens.append(drafts[-1])
        return drafts

    # ---- the worker half of the connector

    def _start_loads(self, plan: StepPlan, computed: dict[str, int]) -> list[Load]:
        started = []
        for fields in json.loads(plan.kv_transfer) if plan.kv_transfer is not None else []:
            load = Load(**fields)
            if not load.tokens:
                slots = [(g, b, i) for g, table in enumerate(load.blocks) for b in table if b for i in range(BLOCK)]
                self.saves.append((load, {slot: self.cache.get(slot) for slot in slots}))
                continue
            num_external = load.start
            if load.request_id in computed and not load.is_async:
                load.end = computed[load.request_id]
            load.start = load.end - num_external
            if load.is_async:
                self.loads.append(load)
            else:
                self._write(load)
                started.append(load)
                if load.is_failing:
                    self.poisoned.add(load.request_id)
        return started

    def _write(self, load: Load) -> None:
        values = digests(load.tokens)
        for group, table in enumerate(load.blocks):
            for position in range(load.start, load.end):
                block = table[position // BLOCK]
                for other in range(len(self.windows)):
                    self.cache.pop((other, block, position % BLOCK), None)
                self.cache[group, block, position % BLOCK] = (position, -1 if load.is_failing else values[position])

    def _finish_transfers(self, started: list[Load]) -> KVTransferResult:
        done = [load for load in self.loads if self.rng.random() < 0.4]
        self.loads = [load for load in self.loads if load not in done]
        for load in done:
            self._write(load)
        saved = [item for item in self.saves if self.rng.random() < 0.4]
        self.saves = [item for item in self.saves if item not in saved]
        for _, before in saved:
            for slot, content in before.items():
                assert self.cache.get(slot) == content, "a block was overwritten while the connector saved it"
        failed = {
            load.request_id: [table[load.start // BLOCK : load.end // BLOCK] for table in load.blocks]
            for load in [*started, *done]
            if load.is_failing
        }
        return KVTransferResult(
            finished_loading=[load.request_id for load in done],
            finished_saving=[load.request_id for load, _ in saved],
            failed_block_ids=failed,
        )


def make_scheduler(
    policy: str = "fcfs",
    *,
    num_blocks: int = 60,
    windows: tuple[int | None, ...] = (None,),
    caching: bool = True,
    max_num_seqs: int = 6,
    **options: Any,
) -> tuple[Scheduler, BlockKVManager]:
    """A scheduler over a small cache, synchronous unless told otherwise."""
    specs = {}
    for index, window in enumerate(windows):
        kind = CacheKind.FULL_ATTENTION if window is None else CacheKind.SLIDING_WINDOW
        specs[f"layer{index}"] = KVCacheSpec(
            kind=kind, window=window, block_size=BLOCK, num_kv_heads=1, head_dim=16, head_dim_v=16, dtype="float32",
            page_size_bytes=512,
        )  # fmt: skip
    cache = build_cache_config(specs, 0, num_blocks)
    kv = BlockKVManager(cache, enable_prefix_caching=caching, hash_seed=b"test")
    settings = {"max_num_batched_tokens": 64, "max_model_len": MAX_LEN, "is_async": False, **options}
    context = SchedulerContext(max_num_seqs=max_num_seqs, kv=kv, cache=cache, **settings)
    return (PriorityScheduler if policy == "priority" else FcfsScheduler)(context), kv


def make_request(name: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> EngineRequest:
    """A greedy request with an end token."""
    options = {"sampling": GREEDY, "eos_token_ids": [EOS], **options}
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), max_tokens=max_tokens, **options)


@dataclass
class Loop:
    """The engine's loop: plans as far ahead as allowed, takes results in, and keeps every request's answer."""

    scheduler: Scheduler
    runner: FakeRunner
    plans: list[StepPlan] = field(default_factory=list)
    flights: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestDelta] = field(default_factory=dict)

    def take(self, deltas: Sequence[RequestDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends, "news after the end"
            self.outputs.setdefault(delta.request_id, []).extend(delta.new_token_ids)
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.context.max_num_batched_tokens
            self.plans.append(plan)
            self.flights.append((plan, self.runner.execute(plan)))
        return plan

    def turn(self) -> None:
        while len(self.flights) < (2 if self.scheduler.context.is_async else 1) and self.plan() is not None:
            pass
        if self.flights:
            self.take(self.scheduler.update(*self.flights.popleft()))
            self.scheduler.check_integrity()

    def run(self, max_turns: int = 5000, between: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left; ``between`` acts before each turn and says whether it will act again."""
        for _ in range(max_turns):
            is_coming = between()
            if not is_coming and not self.scheduler.has_work() and not self.flights:
                return
            self.turn()
        raise AssertionError(f"unfinished after {max_turns} turns: {self.scheduler.request_ids()}")


def make_loop(
    policy: str = "fcfs", *, num_drafts: int = 0, seed: int = 0, **options: Any
) -> tuple[Loop, BlockKVManager]:
    """A loop over a new scheduler and the fake runner."""
    scheduler, kv = make_scheduler(policy, num_speculative_tokens=num_drafts, **options)
    context = scheduler.context
    runner = FakeRunner(
        windows=options.get("windows", (None,)),
        max_num_seqs=context.max_num_seqs,
        max_len=context.max_model_len,
        num_drafts=num_drafts,
        rng=random.Random(seed),
    )
    return Loop(scheduler, runner), kv
