"""What the suite of schedulers watches plans with: a KV manager by brute force, a runner that checks, a connector, a loop.

The model of the runner: the next token is a digest of all tokens before it. A slot of the cache holds the digest up to its
token, so that reading a block that was overwritten, given away or never computed is found.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rabbet.contracts.kv_connector import ConnectorScheduler, ExternalHit
from rabbet.contracts.scheduler import CacheHit, KVManager, Scheduler, SchedulerContext
from rabbet.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec
from rabbet.types.outputs import FinishReason, KVTransferResult, RequestDelta, StepResult, TokenLogprobs
from rabbet.types.plan import StepPlan
from rabbet.types.request import EngineRequest, Request
from rabbet.types.sampling import SamplingParams

__all__ = ["BLOCK", "EOS", "MAX_LEN", "Ledger", "Loop", "answer", "make_request", "next_token"]

BLOCK, EOS, MAX_LEN, VOCABULARY = 4, 7, 48, 40
_LOST = -1


def next_token(tokens: Sequence[int]) -> int:
    """The model."""
    return _digest(tokens) % 65521 % VOCABULARY


def _digest(tokens: Sequence[int]) -> int:
    value = 11
    for token in tokens:
        value = (value * 999_983 + token + 3) % (1 << 61)
    return value


def make_request(name: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> EngineRequest:
    """A greedy request with an end token; keywords of ``EngineRequest`` and of ``SamplingParams``."""
    own = {key: options.pop(key) for key in list(options) if key in EngineRequest.__dataclass_fields__}
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": False, **options})
    own = {"eos_token_ids": [] if sampling.ignore_eos else [EOS], **own}
    return EngineRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling=sampling, max_tokens=max_tokens, **own
    )


def answer(request: EngineRequest, longest: int = MAX_LEN) -> tuple[list[int], FinishReason]:
    """What a request gets when it is alone: tokens, and why it ends. ``longest`` counts prompt and output."""
    tokens, output, sampling = list(request.prompt_token_ids), [], request.sampling
    while True:
        output.append(next_token(tokens))
        tokens.append(output[-1])
        if len(output) >= sampling.min_tokens and output[-1] in (*request.eos_token_ids, *sampling.stop_token_ids):
            return output, FinishReason.STOP
        if len(output) >= request.max_tokens or len(tokens) >= longest:
            return output, FinishReason.LENGTH
        if sampling.repetition_detection is not None and len(output) >= sampling.min_tokens:
            rule = sampling.repetition_detection
            for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
                tail = output[-size * rule.min_count :]
                if tail == output[-size:] * rule.min_count:
                    return output, FinishReason.REPETITION


class Ledger(KVManager):
    """One group of full attention; blocks are found again by all that stands before and in them."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.num_blocks, self.caching = num_blocks, caching
        self.tables: dict[str, list[int]] = {}
        self.found: dict[tuple[Any, ...], int] = {}
        self.free = list(range(1, num_blocks))
        self.num_hits = 0

    def _key(self, request: Request, end: int) -> tuple[Any, ...]:
        return (request.spec.cache_salt, request.spec.adapter, *request.token_ids[:end])

    def find_hit(self, request: Request) -> CacheHit:
        """See ``KVManager``."""
        blocks: list[int] = []
        while self.caching and (len(blocks) + 1) * BLOCK < request.num_known_tokens:
            block = self.found.get(self._key(request, (len(blocks) + 1) * BLOCK))
            if block is None:
                break
            blocks.append(block)
        idle = sum(block in self.free for block in blocks)
        return CacheHit(num_tokens=len(blocks) * BLOCK, block_ids=(tuple(blocks),), num_idle_blocks=idle)

    def allocate(
        self, request: Request, num_new_tokens: int, *, hit: CacheHit | None = None, num_external_tokens: int = 0
    ) -> list[list[int]] | None:
        """See ``KVManager``; asserts that a hit comes with the first allocation only, and is still there."""
        table = self.tables.get(request.request_id, [])
        assert num_new_tokens >= 0, f"{num_new_tokens} new tokens"
        touched = list(hit.block_ids[0]) if hit else []
        assert not (touched and table), "a hit is taken by a request that holds blocks already"
        total = request.num_computed_tokens + (hit.num_tokens if hit else 0) + num_external_tokens + num_new_tokens
        num_new = max(0, -(-total // BLOCK) - len(table) - len(touched))
        free = [block for block in self.free if block not in touched]
        if num_new > len(free):
            return None
        new = free[:num_new]
        self.free = free[num_new:]
        self.found = {key: block for key, block in self.found.items() if block not in new}
        self.num_hits += bool(touched)
        self.tables[request.request_id] = [*table, *touched, *new]
        return [[*touched, *new]]

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """See ``KVManager``; asserts that the request holds what it says it has computed."""
        table = self.tables.get(request.request_id, [])
        assert num_computed_tokens <= len(table) * BLOCK, (
            "more tokens are committed than the blocks of the request hold"
        )
        assert num_computed_tokens <= len(request.token_ids), "tokens are committed that nobody knows"
        for end in range(BLOCK, num_computed_tokens + 1, BLOCK):
            self.found.setdefault(self._key(request, end), table[end // BLOCK - 1])

    def release(self, request: Request) -> None:
        """See ``KVManager``."""
        for block in reversed(self.tables.pop(request.request_id, [])):
            if not any(block in table for table in self.tables.values()):
                self.free.append(block)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """See ``KVManager``."""
        return [list(self.tables.get(request_id, []))]

    def reset_prefix_cache(self) -> bool:
        """See ``KVManager``."""
        if self.usage:
            return False
        self.found.clear()
        return True

    @property
    def usage(self) -> float:
        """See ``KVManager``."""
        return 1 - len(self.free) / (self.num_blocks - 1)

    @property
    def num_free_blocks(self) -> int:
        """See ``KVManager``."""
        return len(self.free)

    def check_integrity(self) -> None:
        """See ``KVManager``."""
        held = {block for table in self.tables.values() for block in table}
        assert sorted([*held, *self.free]) == list(range(1, self.num_blocks)), "blocks were lost or given twice"


class _Connector(ConnectorScheduler):
    """Offers all whole blocks of each prompt; every second load is asynchronous, every ``fails``-th fails."""

    def __init__(self, fails: int) -> None:
        self.fails, self.num_loads = fails, 0
        self.queue: list[dict[str, Any]] = []

    def find_hit(self, request: Request, num_local_tokens: int) -> ExternalHit:
        """See ``ConnectorScheduler``."""
        most = (request.num_prompt_tokens - 1) // BLOCK * BLOCK
        return ExternalHit(num_tokens=max(0, most - num_local_tokens), is_async=self.num_loads % 2 == 0)

    def on_allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """See ``ConnectorScheduler``."""
        end = (request.num_prompt_tokens - 1) // BLOCK * BLOCK
        assert len(block_ids[0]) * BLOCK >= end, "a load has too few blocks"
        fails = bool(self.fails) and self.num_loads % self.fails == self.fails - 1
        self.queue.append(
            {"name": request.request_id, "blocks": list(block_ids[0]), "tokens": request.token_ids[:end],
             "start": end - num_external_tokens, "late": self.num_loads % 2 == 0, "fails": fails}
        )  # fmt: skip
        self.num_loads += 1

    def build_transfer(self, num_scheduled_tokens: Mapping[str, int]) -> bytes:
        """See ``ConnectorScheduler``."""
        queue, self.queue = self.queue, []
        return json.dumps(queue).encode()

    def on_result(self, result: KVTransferResult) -> None:
        """See ``ConnectorScheduler``."""

    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """See ``ConnectorScheduler``."""
        return False, {"from": request.request_id}


@dataclass
class _Runner:
    """Runs plans, and asserts what the contract says of them."""

    context: SchedulerContext
    rng: random.Random
    rows: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)
    wanted_logprobs: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    poisoned: set[str] = field(default_factory=set)
    num_steps: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """One step."""
        self.num_steps += 1
        assert plan.step_id == self.num_steps, f"step {plan.step_id} comes as number {self.num_steps}"
        assert plan.num_tokens <= self.context.max_num_batched_tokens, f"{plan.num_tokens} tokens in one step"
        for name in plan.finished_request_ids:
            assert self.rows.pop(name, None) is not None, f"{name} is finished, but has no row"
            self.poisoned.discard(name)
        starts = self._take_rows(plan)
        assert len(self.rows) <= self.context.max_num_seqs, f"{len(self.rows)} rows"
        transfer = self._transfer(plan)
        result = StepResult(step_id=plan.step_id, kv_transfer=transfer)
        for name, count in plan.num_scheduled_tokens.items():
            if name in self.failing:
                result.failed[name] = "NaN in the logits"
                continue
            self._compute(plan, name, starts[name], count, result)
        return result

    def _take_rows(self, plan: StepPlan) -> dict[str, int]:
        starts: dict[str, int] = {}
        for new in plan.new_requests:
            name, prompt = new.request_id, new.token_ids[: new.num_prompt_tokens]
            assert name not in self.rows, f"{name} is new, but has a row"
            for end in range(new.num_prompt_tokens, len(new.token_ids)):
                assert new.token_ids[end] == next_token(new.token_ids[:end]), f"{name} comes back with other tokens"
            self.rows[name], self.prompts[name] = list(new.token_ids), len(prompt)
            self.tables[name], starts[name] = list(new.block_ids[0]), new.num_computed_tokens
            if new.sampling.prompt_logprobs is not None:
                self.wanted_logprobs.add(name)
        for running in plan.running_requests:
            name = running.request_id
            assert name in self.rows and name not in starts, f"{name} has no row, or stands twice in the plan"
            self.tables[name] += running.new_block_ids[0]
            starts[name] = running.num_computed_tokens
        assert set(starts) == set(plan.num_scheduled_tokens), "scheduled requests and rows of the plan differ"
        return starts

    def _compute(self, plan: StepPlan, name: str, start: int, count: int, result: StepResult) -> None:
        row, drafts, table = self.rows[name], plan.draft_token_ids.get(name, []), self.tables[name]
        tokens, end = [*row, *drafts], start + count
        assert count > 0 and end <= len(tokens), f"{name}: tokens {start} to {end} of {len(tokens)}"
        assert not drafts or end == len(tokens), f"{name}: drafts are not the last tokens of the step"
        assert end <= self.context.max_model_len and end <= len(table) * BLOCK, f"{name}: token {end} has no place"
        shared = [
            block for other, blocks in self.tables.items() if other in self.rows and other != name for block in blocks
        ]
        for place in range(start, end):
            block = table[place // BLOCK]
            assert block and block not in shared, f"{name}: block {block} is written, but not its own"
            self.slots[block, place % BLOCK] = _digest(tokens[: place + 1])
        for place in range(0 if name not in self.poisoned else end, end):
            held = self.slots.get((table[place // BLOCK], place % BLOCK), _LOST)
            assert held == _digest(tokens[: place + 1]), f"{name}: block of token {place} holds something else"
        if name in self.wanted_logprobs:
            entry = TokenLogprobs(token_ids=[0], logprobs=[-1.0], ranks=[1])
            result.prompt_logprobs[name] = [entry] * max(0, min(end, self.prompts[name] - 1) - start)
        if end < len(tokens):
            return
        if name in self.poisoned:
            # It has read what a failed load left; whoever lets this token through is found out.
            row.append(VOCABULARY)
            result.sampled_token_ids[name] = [VOCABULARY]
            return
        accepted: list[int] = []
        for draft in [*drafts, None]:
            accepted.append(next_token(row))
            row.append(accepted[-1])
            if accepted[-1] != draft:
                break
        result.sampled_token_ids[name] = accepted
        result.draft_token_ids[name] = self._drafts(row)

    def _drafts(self, row: Sequence[int]) -> list[int]:
        tokens = list(row)
        for _ in range(self.rng.randint(0, self.context.num_speculative_tokens)):
            tokens.append(next_token(tokens) if self.rng.random() < 0.8 else 0)
        return tokens[len(row) :]

    def _transfer(self, plan: StepPlan) -> KVTransferResult | None:
        """Loads that wait for an answer are done one step late; the others now. A failed one leaves the blocks as they are."""
        if self.context.connector is None:
            return None
        new: list[dict[str, Any]] = json.loads(plan.kv_transfer) if plan.kv_transfer is not None else []
        due, self.loads = (
            [*self.loads, *(load for load in new if not load["late"])],
            [load for load in new if load["late"]],
        )
        for load in due:
            if load["fails"] and not load["late"]:
                self.poisoned.add(load["name"])
            for place in range(load["start"], 0 if load["fails"] else len(load["tokens"])):
                self.slots[load["blocks"][place // BLOCK], place % BLOCK] = _digest(load["tokens"][: place + 1])
        return KVTransferResult(
            finished_loading=[load["name"] for load in due if load["late"]],
            failed_block_ids={load["name"]: [load["blocks"]] for load in due if load["fails"]},
        )


class Loop:
    """The engine's loop round a scheduler: plans as far ahead as it is given, results in order, news by request."""

    def __init__(
        self,
        plugin_class: type[Any],
        *,
        seed: int = 0,
        num_blocks: int = 60,
        caching: bool = True,
        fails: int | None = None,
        **settings: Any,
    ) -> None:
        """A new scheduler.

        Args:
            plugin_class: The plugin.
            seed: Of the drafts.
            num_blocks: Blocks of ``BLOCK`` tokens, the null block included.
            caching: Whether the KV manager finds prefixes.
            fails: Attach a connector whose every ``fails``-th load fails (0: none does); None: no connector.
            **settings: Fields of ``SchedulerContext``.
        """
        spec = KVCacheSpec(
            block_size=BLOCK, num_kv_heads=1, head_dim=8, head_dim_v=8, dtype="float32", page_size_bytes=256
        )
        group = KVCacheGroup(group_id=0, spec=spec, layer_names=("layer",))
        cache = KVCacheConfig(num_blocks=num_blocks, groups=(group,), tensors=())
        self.kv = Ledger(num_blocks, caching=caching)
        values = {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 4,
            "max_model_len": MAX_LEN,
            "is_async": False,
            **settings,
        }
        connector = None if fails is None else _Connector(fails)
        self.context = SchedulerContext(kv=self.kv, cache=cache, connector=connector, **values)
        self.scheduler: Scheduler = plugin_class(self.context)
        self.runner = _Runner(self.context, random.Random(seed))
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []
        self.deepest = 0
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, RequestDelta] = {}
        self.prompt_logprobs: dict[str, int] = {}

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self.scheduler.add(request)
        self.check()

    def finish(self, names: Sequence[str], reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> None:
        """End requests from outside."""
        self.take(self.scheduler.finish(names, reason, error=error))
        self.check()

    def take(self, deltas: Sequence[RequestDelta]) -> None:
        """News; none may come after an end."""
        for delta in deltas:
            name = delta.request_id
            assert name not in self.ends, f"{name} has news after its end"
            is_first = name not in self.outputs
            assert is_first or delta.queued_s is None, f"{name}: queued_s is told twice"
            self.outputs.setdefault(name, []).extend(delta.new_token_ids)
            self.prompt_logprobs[name] = self.prompt_logprobs.get(name, 0) + len(delta.prompt_logprobs or ())
            if delta.finish_reason is not None:
                self.ends[name] = delta

    def check(self) -> None:
        """Both books balance, and the ids are those that have not ended."""
        self.scheduler.check_integrity()
        self.kv.check_integrity()

    def plan(self) -> bool:
        """One plan more, if there is one; it runs at once, its result waits."""
        plan = self.scheduler.schedule()
        self.check()
        if plan is None:
            return False
        self.plans.append(plan)
        self.flights.append((plan, self.runner.execute(plan)))
        self.deepest = max(self.deepest, len(self.flights))
        return True

    def turn(self) -> None:
        """Plan ahead, take in the oldest result."""
        while len(self.flights) < (2 if self.context.is_async else 1) and self.plan():
            pass
        if self.flights:
            self.take(self.scheduler.update(*self.flights.popleft()))
            self.check()

    def run(self, max_turns: int = 3000) -> None:
        """Until all have ended.

        Raises:
            AssertionError: If they do not.
        """
        for _ in range(max_turns):
            if not self.scheduler.has_work() and not self.flights:
                break
            self.turn()
        assert not self.scheduler.request_ids(), f"no end after {max_turns} turns: {self.scheduler.request_ids()}"
        assert not self.kv.tables, f"blocks are still held: {self.kv.tables}"
