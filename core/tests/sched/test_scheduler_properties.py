"""Thousands of random arrivals, aborts, preemptions and hits drive scheduler and KV manager; the books balance after each step."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rabbet.contracts.scheduler import Scheduler, SchedulerContext
from rabbet.kv.groups import build_cache_config
from rabbet.kv.manager import BlockKVManager
from rabbet.sched.scheduler import FcfsScheduler, PriorityScheduler
from rabbet.types.kv import CacheKind, KVCacheSpec
from rabbet.types.outputs import FinishReason, StepResult
from rabbet.types.plan import StepPlan
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams

BLOCK = 4
MAX_LEN = 48
EOS = 7


def next_token(tokens: list[int]) -> int:
    """The model: the next token is a function of all tokens before it."""
    value = 17
    for token in tokens:
        value = (value * 31 + token) % 65537
    return value % 50


def reference(prompt: list[int], max_tokens: int) -> tuple[list[int], FinishReason]:
    """What a request gives alone."""
    tokens, out = list(prompt), []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        out.append(token)
        if token == EOS:
            return out, FinishReason.STOP
        if len(out) >= max_tokens or len(tokens) >= MAX_LEN:
            return out, FinishReason.LENGTH


@dataclass
class FakeRunner:
    """Executes plans as the real runner does, and checks each of them against a cache that it keeps by slot."""

    num_groups: int
    window: int | None
    rows: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    cache: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.finished_request_ids:
            self.rows.pop(request_id)
            self.tables.pop(request_id)
        computed: dict[str, int] = {}
        for new in plan.new_requests:
            assert new.request_id not in self.rows, "a row is made twice"
            self.rows[new.request_id] = list(new.token_ids)
            self.tables[new.request_id] = [list(blocks) for blocks in new.block_ids]
            computed[new.request_id] = new.num_computed_tokens
        for running in plan.running_requests:
            for table, blocks in zip(self.tables[running.request_id], running.new_block_ids, strict=True):
                table.extend(blocks)
            computed[running.request_id] = running.num_computed_tokens
        assert set(computed) == set(plan.num_scheduled_tokens), "scheduled requests and rows differ"
        sampled = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            assert count > 0
            token = self._compute(request_id, computed[request_id], count)
            if token is not None:
                sampled[request_id] = [token]
        return StepResult(step_id=plan.step_id, sampled_token_ids=sampled)

    def _compute(self, request_id: str, start: int, count: int) -> int | None:
        tokens = self.rows[request_id]
        end = start + count
        assert end <= len(tokens), "tokens are scheduled that the row does not know"
        for group, table in enumerate(self.tables[request_id]):
            assert len(table) * BLOCK >= end, "a token has no block"
            for position in range(start, end):
                self.cache[group, table[position // BLOCK], position % BLOCK] = (
                    position,
                    hash(tuple(tokens[: position + 1])),
                )
            first = 0 if group == 0 or self.window is None else max(0, start - self.window + 1)
            for position in range(first, end):
                seen = self.cache.get((group, table[position // BLOCK], position % BLOCK))
                wanted = (position, hash(tuple(tokens[: position + 1])))
                assert seen == wanted, f"group {group}: the block of position {position} holds other content"
        if end < len(tokens):
            return None
        token = next_token(tokens)
        tokens.append(token)
        return token


def make(
    policy: str, *, num_blocks: int, is_async: bool, window: int | None, budget: int, caching: bool
) -> tuple[Scheduler, BlockKVManager]:
    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_dim": 16, "head_dim_v": 16, "dtype": "float32"}
    specs = {"full": KVCacheSpec(page_size_bytes=512, **common)}
    if window is not None:
        specs["local"] = KVCacheSpec(page_size_bytes=512, kind=CacheKind.SLIDING_WINDOW, window=window, **common)
    cache = build_cache_config(specs, 0, num_blocks)
    kv = BlockKVManager(cache, enable_prefix_caching=caching, hash_seed=b"test")
    context = SchedulerContext(
        max_num_batched_tokens=budget, max_num_seqs=6, max_model_len=MAX_LEN, kv=kv, cache=cache, is_async=is_async,
        long_prefill_token_threshold=budget // 2 if budget > 16 else 0,
    )  # fmt: skip
    return (PriorityScheduler if policy == "priority" else FcfsScheduler)(context), kv


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["fcfs", "priority"]),
    is_async=st.booleans(),
    window=st.sampled_from([None, 6, 9]),
    num_blocks=st.integers(28, 60),
    budget=st.sampled_from([6, 16, 64]),
    caching=st.booleans(),
)
def test_random_traffic_gives_every_request_its_own_tokens_and_one_end(
    seed: int, policy: str, is_async: bool, window: int | None, num_blocks: int, budget: int, caching: bool
) -> None:
    rng = random.Random(seed)
    scheduler, kv = make(
        policy, num_blocks=num_blocks, is_async=is_async, window=window, budget=budget, caching=caching
    )
    runner = FakeRunner(num_groups=2 if window else 1, window=window)
    flights: deque[tuple[StepPlan, StepResult]] = deque()
    requests: dict[str, EngineRequest] = {}
    outputs: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    head = [rng.randrange(50) for _ in range(12)]

    def take(deltas: list) -> None:
        for delta in deltas:
            assert delta.request_id not in ends, "news after the end"
            outputs.setdefault(delta.request_id, []).extend(delta.new_token_ids)
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.finish_reason

    left = 25
    for _ in range(4000):
        if left and rng.random() < 0.3:
            left -= 1
            prompt = (head if rng.random() < 0.6 else []) + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
            request = EngineRequest(
                request_id=f"r{left}", prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.0), priority=rng.randrange(3),
                max_tokens=rng.randint(1, 20), eos_token_ids=[EOS], arrival_time_s=float(25 - left),
            )  # fmt: skip
            requests[request.request_id] = request
            scheduler.add(request)
        if requests and rng.random() < 0.02:
            take(scheduler.finish([rng.choice(list(requests))], FinishReason.ABORT))
            scheduler.check_integrity()
        while len(flights) < (2 if is_async else 1):
            plan = scheduler.schedule()
            scheduler.check_integrity()
            if plan is None:
                break
            assert plan.num_tokens <= budget
            flights.append((plan, runner.execute(plan)))
        if flights:
            plan, result = flights.popleft()
            take(scheduler.update(plan, result))
            scheduler.check_integrity()
        if not left and not scheduler.has_work() and not flights:
            break
    assert set(ends) == set(requests), "a request never ended"
    for request_id, reason in ends.items():
        request = requests[request_id]
        expected, wanted = reference(request.prompt_token_ids, request.max_tokens)
        if reason is FinishReason.ABORT:
            assert outputs.get(request_id, []) == expected[: len(outputs.get(request_id, []))]
        else:
            assert (outputs[request_id], reason) == (expected, wanted)
    assert kv.usage == 0 and kv.num_free_blocks == num_blocks - 1


def test_preemption_really_happens_and_is_counted() -> None:
    scheduler, _ = make("fcfs", num_blocks=14, is_async=False, window=None, budget=64, caching=False)
    runner = FakeRunner(num_groups=1, window=None)
    for i in range(6):
        scheduler.add(
            EngineRequest(
                request_id=str(i), prompt_token_ids=[i + 1] * 5, sampling=SamplingParams(temperature=0.0), max_tokens=20
            )
        )
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, runner.execute(plan))
    assert scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priority_decides_the_order_under_its_policy_only(policy: str) -> None:
    scheduler, _ = make(policy, num_blocks=60, is_async=False, window=None, budget=6, caching=False)
    for name, priority in (("late", 5), ("soon", 1)):
        scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=[1] * 6,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=1,
                priority=priority,
            )
        )
    plan = scheduler.schedule()
    assert plan is not None
    assert list(plan.num_scheduled_tokens) == (["soon"] if policy == "priority" else ["late"])


def test_failed_row_ends_that_request_alone() -> None:
    scheduler, _ = make("fcfs", num_blocks=60, is_async=True, window=None, budget=64, caching=True)
    runner = FakeRunner(num_groups=1, window=None)
    for name in ("good", "bad"):
        scheduler.add(
            EngineRequest(
                request_id=name, prompt_token_ids=[1, 2], sampling=SamplingParams(temperature=0.0), max_tokens=3
            )
        )
    plan = scheduler.schedule()
    assert plan is not None
    result = runner.execute(plan)
    result.sampled_token_ids.pop("bad")
    (bad, good) = sorted(
        scheduler.update(
            plan, StepResult(step_id=plan.step_id, sampled_token_ids=result.sampled_token_ids, failed={"bad": "NaN"})
        ),
        key=lambda delta: delta.request_id,
    )
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "NaN")
    assert good.finish_reason is None and good.new_token_ids
    scheduler.check_integrity()


def test_request_that_can_never_fit_says_what_would() -> None:
    scheduler, _ = make("fcfs", num_blocks=5, is_async=False, window=None, budget=64, caching=False)
    with pytest.raises(ValueError, match="needs 6 KV blocks, but the cache has 4: about 16 tokens would fit"):
        scheduler.add(EngineRequest(request_id="a", prompt_token_ids=[1] * 22, sampling=SamplingParams(), max_tokens=1))
    assert not scheduler.has_work()


def test_full_queue_refuses_and_keeps_nothing() -> None:
    from dataclasses import replace

    from rabbet.errors import OverloadedError

    scheduler, _ = make("fcfs", num_blocks=60, is_async=False, window=None, budget=64, caching=False)
    scheduler.context = replace(scheduler.context, max_num_queued_requests=1)
    request = EngineRequest(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=1)
    scheduler.add(request)
    with pytest.raises(OverloadedError, match="limit is 1"):
        scheduler.add(replace(request, request_id="b"))
    assert scheduler.request_ids() == ["a"]
