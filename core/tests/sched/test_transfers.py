"""What the scheduler does with a KV connector, one behaviour a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from sched_harness import make_request, make_scheduler

from rabbet.contracts.kv_connector import ConnectorScheduler, ExternalHit
from rabbet.contracts.scheduler import Scheduler
from rabbet.errors import InvalidRequestError
from rabbet.kv.manager import BlockKVManager
from rabbet.types.outputs import FinishReason, KVTransferResult, RequestDelta, StepResult
from rabbet.types.plan import StepPlan
from rabbet.types.request import Request
from rabbet.types.sampling import SamplingParams

PROMPT = list(range(1, 13))


class Scripted(ConnectorScheduler):
    """Answers from a table, and remembers what it was told."""

    def __init__(self, *, is_async: bool = False, keeps: bool = False, **offers: int | None) -> None:
        self.offers, self.is_async, self.keeps = offers, is_async, keeps
        self.asked: list[tuple[str, int]] = []
        self.allocated: list[tuple[str, list[list[int]], int]] = []
        self.ended: list[tuple[str, list[list[int]]]] = []
        self.raising = ""

    def _maybe_raise(self, name: str) -> None:
        if self.raising == name:
            raise RuntimeError(name)

    def find_hit(self, request: Request, num_local_tokens: int) -> ExternalHit:
        self.asked.append((request.request_id, num_local_tokens))
        self._maybe_raise("find_hit")
        return ExternalHit(num_tokens=self.offers.get(request.request_id, 0), is_async=self.is_async)

    def on_allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        self._maybe_raise("on_allocated")
        self.allocated.append((request.request_id, [list(ids) for ids in block_ids], num_external_tokens))

    def build_transfer(self, num_scheduled_tokens: Mapping[str, int]) -> bytes:
        return ",".join(num_scheduled_tokens).encode()

    def on_result(self, result: KVTransferResult) -> None:
        self._maybe_raise("on_result")

    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self._maybe_raise("on_finished")
        self.ended.append((request.request_id, [list(ids) for ids in block_ids]))
        return self.keeps, {"told": request.request_id}


def start(connector: Scripted, **options: Any) -> tuple[Scheduler, BlockKVManager]:
    return make_scheduler(connector=connector, **options)


def step(scheduler: Scheduler, *, tokens: int = 9, **report: Any) -> tuple[StepPlan, list[RequestDelta]]:
    """A step in which every request that reaches its last known token gets one."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_integrity()
    ends = {new.request_id: (new.num_computed_tokens, len(new.token_ids)) for new in plan.new_requests}
    sampled = {
        name: [tokens]
        for name, count in plan.num_scheduled_tokens.items()
        if name not in ends or ends[name][0] + count == ends[name][1]
    }
    transfer = KVTransferResult(**report) if report else None
    deltas = scheduler.update(plan, StepResult(step_id=plan.step_id, sampled_token_ids=sampled, kv_transfer=transfer))
    scheduler.check_integrity()
    return plan, deltas


def test_load_inside_the_first_step_shortens_it_and_never_covers_the_last_token() -> None:
    for offer, computed in ((8, 8), (12, 8), (400, 8), (7, 4), (3, 0)):
        connector = Scripted(a=offer)
        scheduler, _ = start(connector)
        scheduler.add(make_request("a", PROMPT))
        plan, (delta,) = step(scheduler)
        (new,) = plan.new_requests
        assert (new.num_computed_tokens, plan.num_scheduled_tokens) == (computed, {"a": 12 - computed})
        assert delta.num_cached_tokens == computed and plan.kv_transfer == b"a"
        assert connector.allocated == ([("a", new.block_ids, computed)] if computed else [])


def test_connector_is_asked_for_what_the_local_cache_lacks() -> None:
    connector = Scripted(b=400)
    scheduler, _ = start(connector)
    scheduler.add(make_request("a", PROMPT[:8], 1))
    step(scheduler)
    scheduler.add(make_request("b", [*PROMPT, 13, 14]))
    plan, _ = step(scheduler)
    assert connector.asked == [("a", 0), ("b", 8)]
    assert connector.allocated[0][2] == 4 and plan.new_requests[0].num_computed_tokens == 12


def test_request_that_skips_caches_is_not_asked_for() -> None:
    connector = Scripted(a=8)
    scheduler, _ = start(connector)
    scheduler.add(make_request("a", PROMPT, sampling=SamplingParams(temperature=0.0, prompt_logprobs=0)))
    plan, _ = step(scheduler)
    assert not connector.asked and plan.num_scheduled_tokens == {"a": 12}


def test_request_that_waits_for_a_load_is_overtaken_and_then_goes_first() -> None:
    connector = Scripted(a=8, is_async=True)
    scheduler, _ = start(connector)
    for name in "ab":
        scheduler.add(make_request(name, PROMPT if name == "a" else [3, 4]))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 2} and scheduler.stats().num_waiting == 1
    step(scheduler, finished_loading=["a"])
    plan, deltas = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 1, "a": 4}
    (new,) = plan.new_requests
    assert new.num_computed_tokens == 8 and len(new.block_ids[0]) == 3
    assert {delta.request_id: delta.num_cached_tokens for delta in deltas} == {"b": 0, "a": 8}


def test_loaded_blocks_are_found_by_others_afterwards() -> None:
    connector = Scripted(a=8, is_async=True)
    scheduler, _ = start(connector)
    scheduler.add(make_request("a", PROMPT, 1))
    step(scheduler, finished_loading=["a"])
    step(scheduler)
    scheduler.add(make_request("b", [*PROMPT, 13]))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 1}


def test_steps_without_tokens_go_on_one_at_a_time_while_a_load_runs() -> None:
    scheduler, _ = start(Scripted(a=8, is_async=True), is_async=True)
    scheduler.add(make_request("a", PROMPT))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens == 0 and plan.kv_transfer == b""
    assert scheduler.schedule() is None
    scheduler.update(plan, StepResult(step_id=plan.step_id, kv_transfer=KVTransferResult()))
    assert scheduler.schedule() is not None


def test_request_whose_hit_is_not_known_lets_others_go_first_and_keeps_its_place() -> None:
    connector = Scripted(a=None)
    scheduler, _ = start(connector, max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [3, 4], 1 if name == "b" else 8))
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["b", "c"]
    connector.offers["a"] = 0
    scheduler.add(make_request("d", [3, 4]))
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens) == ["c", "a"]


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_load_ends_the_request_by_default(is_async: bool) -> None:
    scheduler, kv = start(Scripted(a=8, is_async=is_async))
    scheduler.add(make_request("a", PROMPT))
    scheduler.add(make_request("b", [3, 4]))
    done = {"finished_loading": ["a"]} if is_async else {}
    _, deltas = step(scheduler, failed_block_ids={"a": [[2]]}, **done)
    ends = {delta.request_id: delta.finish_reason for delta in deltas}
    assert ends == {"a": FinishReason.ERROR, "b": None}
    assert "could not be loaded" in (deltas[0].error or "") and deltas[0].new_token_ids == []
    assert scheduler.request_ids() == ["b"] and kv.usage > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_load_is_computed_here_if_asked_for_and_not_tried_again(is_async: bool) -> None:
    connector = Scripted(a=8, is_async=is_async)
    scheduler, _ = start(connector, kv_load_failure_policy="recompute")
    scheduler.add(make_request("a", PROMPT))
    done = {"finished_loading": ["a"]} if is_async else {}
    _, deltas = step(scheduler, failed_block_ids={"a": [[2]]}, **done)
    assert deltas == [] and scheduler.stats().num_preemptions == 0
    plan, (delta,) = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 12} and len(connector.asked) == 1
    assert plan.finished_request_ids == ([] if is_async else ["a"])
    assert (delta.new_token_ids, delta.num_cached_tokens) == ([9], 0)


def test_failure_told_before_the_load_is_over_counts_when_it_is() -> None:
    scheduler, kv = start(Scripted(a=8, is_async=True))
    scheduler.add(make_request("a", PROMPT))
    _, deltas = step(scheduler, failed_block_ids={"a": [[2]]})
    assert deltas == [] and kv.usage > 0
    _, (end,) = step(scheduler, finished_loading=["a"])
    assert end.finish_reason is FinishReason.ERROR and kv.usage == 0


def test_blocks_of_an_aborted_load_stay_until_it_is_over() -> None:
    scheduler, kv = start(Scripted(a=8, is_async=True))
    scheduler.add(make_request("a", PROMPT))
    step(scheduler, finished_saving=[])
    (end,) = scheduler.finish(["a"], FinishReason.ABORT)
    assert end.finish_reason is FinishReason.ABORT and kv.usage > 0 and scheduler.has_work()
    assert scheduler.request_ids() == []
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add(make_request("a", [1]))
    assert not scheduler.reset_prefix_cache()
    step(scheduler, finished_loading=["a"])
    assert kv.usage == 0 and not scheduler.has_work()


def test_blocks_of_an_ended_request_stay_until_they_are_saved() -> None:
    connector = Scripted(keeps=True)
    scheduler, kv = start(connector)
    scheduler.add(make_request("a", PROMPT, 1))
    plan, (end,) = step(scheduler)
    assert end.kv_transfer_params == {"told": "a"}
    assert connector.ended == [("a", plan.new_requests[0].block_ids)]
    step(scheduler, finished_saving=["other"])
    assert kv.usage > 0
    step(scheduler, finished_saving=["a"])
    assert kv.usage == 0 and not scheduler.has_work()


def test_connector_is_told_of_no_block_left_of_a_window() -> None:
    connector = Scripted()
    scheduler, _ = start(connector, windows=(5,))
    scheduler.add(make_request("a", PROMPT, 2))
    step(scheduler)
    step(scheduler)
    assert connector.ended[0][1][0][:2] == [0, 0]


def test_requests_that_loaded_give_way_when_nothing_could_run() -> None:
    # Six blocks: each load takes two, and each request needs four in the end.
    connector = Scripted(a=8, b=8, c=8, is_async=True)
    scheduler, kv = start(connector, num_blocks=7, caching=False)
    for name in "abc":
        scheduler.add(make_request(name, PROMPT, 4, eos_token_ids=[]))
    step(scheduler, finished_loading=["a", "b", "c"])
    assert kv.num_free_blocks == 0
    ends = []
    connector.offers.clear()
    for _ in range(40):
        if scheduler.has_work():
            ends += [delta.request_id for delta in step(scheduler)[1] if delta.finish_reason is FinishReason.LENGTH]
    assert sorted(ends) == ["a", "b", "c"] and kv.usage == 0


@pytest.mark.parametrize("raising", ["find_hit", "on_allocated", "on_result", "on_finished"])
def test_connector_that_raises_costs_the_hit_and_nothing_else(raising: str, caplog: pytest.LogCaptureFixture) -> None:
    connector = Scripted(a=8, keeps=True)
    connector.raising = raising
    scheduler, kv = start(connector)
    scheduler.add(make_request("a", PROMPT, 1))
    deltas: list[RequestDelta] = []
    while not deltas:
        if (plan := scheduler.schedule()) is not None:
            answer = StepResult(step_id=plan.step_id, sampled_token_ids={"a": [9]}, kv_transfer=KVTransferResult())
            deltas = scheduler.update(plan, answer)
    if raising == "on_result" or raising in ("find_hit", "on_allocated"):
        step(scheduler, finished_saving=["a"])
    assert deltas[0].finish_reason is FinishReason.LENGTH and deltas[0].new_token_ids == [9]
    assert deltas[0].num_cached_tokens == (0 if raising in ("find_hit", "on_allocated") else 8)
    assert kv.usage == 0 and "the KV connector" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_connector_was_asked_for_had_and_loaded_is_counted(is_async: bool) -> None:
    scheduler, _ = start(Scripted(is_async=is_async, a=8, b=0), caching=False)
    for name in "ab":
        scheduler.add(make_request(name, PROMPT))
    step(scheduler)
    assert scheduler.stats().num_waiting_deferred == int(is_async)
    if is_async:
        step(scheduler, finished_loading=["a"])
        step(scheduler)
    stats = scheduler.stats()
    assert (stats.external_queries, stats.external_hits) == (24, 8) and stats.num_waiting_deferred == 0
    assert (stats.num_prompt_tokens, stats.num_external_cached_tokens, stats.num_local_cached_tokens) == (24, 8, 0)


def test_who_waits_for_an_answer_of_the_connector_is_deferred_and_not_short_of_room() -> None:
    scheduler, _ = start(Scripted(a=None, b=0))
    for name in "ab":
        scheduler.add(make_request(name, PROMPT))
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_waiting, stats.num_waiting_deferred) == (1, 1)
