"""What the scheduler decides, one behaviour a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sched_harness import EOS, FakeRunner, make_loop, make_request, make_scheduler, reference

from rabbet.errors import ClientError, ContextLengthError, InvalidRequestError, OverloadedError
from rabbet.sched.queue import FcfsQueue, PriorityQueue, RequestQueue
from rabbet.types.outputs import FinishReason, StepResult, TokenLogprobs
from rabbet.types.plan import StepPlan
from rabbet.types.request import Request
from rabbet.types.sampling import RepetitionDetection, SamplingParams


def planned(plan: StepPlan | None) -> StepPlan:
    assert plan is not None
    return plan


def result(plan: StepPlan, **tokens: list[int]) -> StepResult:
    return StepResult(step_id=plan.step_id, sampled_token_ids=tokens)


def no_end(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **options)


# ---- order and budgets


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priority_decides_the_order_under_its_policy_only(policy: str) -> None:
    scheduler, _ = make_scheduler(policy, max_num_batched_tokens=6)
    scheduler.add(make_request("late", [1] * 6, priority=5))
    scheduler.add(make_request("soon", [1] * 6, priority=1))
    assert list(planned(scheduler.schedule()).num_scheduled_tokens) == (["soon"] if policy == "priority" else ["late"])


def test_running_requests_come_before_waiting_ones() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_request("a", [1] * 3))
    plan = planned(scheduler.schedule())
    scheduler.update(plan, result(plan, a=[9]))
    scheduler.add(make_request("b", [1] * 20))
    assert planned(scheduler.schedule()).num_scheduled_tokens == {"a": 1, "b": 5}


def test_number_of_running_requests_is_limited() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1, 2]))
    assert list(planned(scheduler.schedule()).num_scheduled_tokens) == ["a", "b"]
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (2, 1)


def test_long_prefill_threshold_caps_a_request_unless_it_is_alone() -> None:
    scheduler, _ = make_scheduler(long_prefill_token_threshold=5)
    scheduler.add(make_request("a", [1] * 12))
    assert planned(scheduler.schedule()).num_scheduled_tokens == {"a": 12}
    scheduler, _ = make_scheduler(long_prefill_token_threshold=5)
    scheduler.add(make_request("a", [1] * 12))
    scheduler.add(make_request("b", [2] * 3))
    assert planned(scheduler.schedule()).num_scheduled_tokens == {"a": 5, "b": 3}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    scheduler, _ = make_scheduler(is_chunked_prefill=False, max_num_batched_tokens=16)
    scheduler.add(make_request("a", [1] * 10))
    scheduler.add(make_request("b", [2] * 10))
    plan = planned(scheduler.schedule())
    assert plan.num_scheduled_tokens == {"a": 10}
    scheduler.update(plan, result(plan, a=[9]))
    assert planned(scheduler.schedule()).num_scheduled_tokens == {"a": 1, "b": 10}


def test_without_chunked_prefill_a_preempted_request_that_outgrew_a_step_still_ends() -> None:
    loop, _ = make_loop(
        num_blocks=13, is_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=40, caching=False
    )
    for name in "abcd":
        loop.scheduler.add(make_request(name, [ord(name)] * 14, 20, sampling=no_end()))
    loop.run(max_turns=500)
    assert loop.scheduler.stats().num_preemptions > 0
    assert max(len(new.token_ids) for plan in loop.plans for new in plan.new_requests) > 16
    assert all(len(output) == 20 for output in loop.outputs.values())


def test_whole_prompt_must_fit_before_a_request_joins_others() -> None:
    for reserve, expected in ((True, {"a"}), (False, {"a", "b"})):
        scheduler, _ = make_scheduler(num_blocks=8, max_num_batched_tokens=16, reserve_full_prompt=reserve)
        scheduler.add(make_request("a", [1] * 12))
        scheduler.add(make_request("b", [2] * 20))
        assert set(planned(scheduler.schedule()).num_scheduled_tokens) == expected


# ---- preemption


def test_preempted_request_is_the_newest_and_comes_back_first() -> None:
    loop, _ = make_loop(num_blocks=14, caching=False)
    for i in range(6):
        loop.scheduler.add(make_request(str(i), [i + 1] * 5, 20, sampling=no_end()))
    while not loop.scheduler.stats().num_preemptions:
        loop.turn()
    queue = [request_id for request_id in loop.scheduler.request_ids() if request_id not in loop.runner.rows]
    loop.run()
    admitted = [new.request_id for plan in loop.plans for new in plan.new_requests]
    assert admitted[:2] == ["0", "1"] and queue
    first = {name: admitted.index(name) for name in admitted}
    assert sorted(first, key=first.__getitem__) == [str(i) for i in range(6)]
    assert sum(end.num_preemptions for end in loop.ends.values()) == loop.scheduler.stats().num_preemptions


def test_victim_before_the_request_in_the_list_does_not_make_it_lose_its_turn() -> None:
    loop, _ = make_loop("priority", num_blocks=8, caching=False)
    loop.scheduler.add(make_request("low", [1] * 5, 20, sampling=no_end(), priority=9))
    loop.turn()
    loop.scheduler.add(make_request("high", [2] * 12, 20, sampling=no_end(), priority=0))
    while "low" in planned(loop.plan()).num_scheduled_tokens:
        loop.take(loop.scheduler.update(*loop.flights.popleft()))
    assert loop.plans[-1].num_scheduled_tokens == {"high": 1}
    assert loop.plans[-1].finished_request_ids == ["low"]


def test_request_that_gives_way_to_itself_does_not_stop_the_others() -> None:
    loop, _ = make_loop("priority", num_blocks=9, caching=False, max_num_batched_tokens=64)
    loop.scheduler.add(make_request("low", [1] * 16, 20, sampling=no_end(), priority=9))
    loop.turn()
    for name in "abc":
        loop.scheduler.add(make_request(name, [2] * 3, 5, sampling=no_end(), priority=0))
    while "low" in planned(loop.plan()).num_scheduled_tokens:
        loop.take(loop.scheduler.update(*loop.flights.popleft()))
    assert set(loop.plans[-1].num_scheduled_tokens) == {"a", "b", "c"}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_request_is_not_admitted_to_lose_the_same_token_again(is_async: bool, caching: bool) -> None:
    loop, _ = make_loop(num_blocks=8, caching=caching, is_async=is_async)
    for name in "abc":
        loop.scheduler.add(make_request(name, [ord(name) % 50] * 9, 9, sampling=no_end()))
    loop.run()
    assert 0 < loop.scheduler.stats().num_preemptions <= 2


def test_request_that_outgrows_the_pool_ends_with_length() -> None:
    loop, kv = make_loop(num_blocks=9)
    loop.scheduler.add(make_request("a", [1] * 8, 40, sampling=no_end()))
    loop.run(max_turns=100)
    assert len(loop.outputs["a"]) == 24 and loop.ends["a"].finish_reason is FinishReason.LENGTH
    assert loop.scheduler.stats().num_preemptions == 0 and kv.usage == 0


def test_window_is_sized_for_the_steps_under_way() -> None:
    # A window of 5 and steps of 8: before a result is taken in a request holds 4 + 8 tokens and a block more, or 4 + 16
    # tokens and a block more with two steps under way. The pool has 5 blocks of 4.
    options = {"num_blocks": 6, "windows": (5,), "max_num_batched_tokens": 8, "max_model_len": 200, "caching": False}
    loop, _ = make_loop(is_async=False, **options)
    loop.scheduler.add(make_request("a", [1] * 150, 20, sampling=no_end()))
    loop.run(max_turns=200)
    assert len(loop.outputs["a"]) == 20 and loop.scheduler.stats().num_preemptions == 0
    loop, _ = make_loop(is_async=True, **options)
    with pytest.raises(InvalidRequestError, match="at most 19 fit"):
        loop.scheduler.add(make_request("a", [1] * 150))
    loop.scheduler.add(make_request("a", [1] * 19, 20, sampling=no_end()))
    loop.run(max_turns=200)
    assert len(loop.outputs["a"]) == 1 and loop.scheduler.stats().num_preemptions == 0


# ---- async


@pytest.mark.parametrize("is_async", [False, True])
def test_no_token_is_planned_past_the_last(is_async: bool) -> None:
    for max_tokens, max_model_len in ((5, 48), (40, 9)):
        loop, _ = make_loop(is_async=is_async, max_model_len=max_model_len)
        loop.scheduler.add(make_request("a", [1, 2, 3, 4], max_tokens, sampling=no_end()))
        loop.run()
        assert [plan.num_tokens for plan in loop.plans] == [4, 1, 1, 1, 1]


def test_result_of_an_aborted_request_is_dropped_even_if_its_id_comes_again() -> None:
    scheduler, kv = make_scheduler(is_async=True)
    scheduler.add(make_request("a", [1, 2, 3]))
    old = planned(scheduler.schedule())
    (end,) = scheduler.finish(["a", "a", "unknown"], FinishReason.ABORT)
    assert end.finish_reason is FinishReason.ABORT
    scheduler.add(make_request("a", [4, 5, 6]))
    new = planned(scheduler.schedule())
    assert new.finished_request_ids == ["a"] and new.new_requests[0].token_ids == [4, 5, 6]
    assert scheduler.update(old, result(old, a=[42])) == []
    (delta,) = scheduler.update(new, result(new, a=[43]))
    assert delta.new_token_ids == [43]
    scheduler.finish(["a"], FinishReason.ABORT)
    assert kv.usage == 0


def test_results_are_taken_in_order_only() -> None:
    scheduler, _ = make_scheduler(is_async=True)
    scheduler.add(make_request("a", [1, 2, 3]))
    first, second = planned(scheduler.schedule()), planned(scheduler.schedule())
    with pytest.raises(ValueError, match="step 2 given, but the oldest step under way is 1"):
        scheduler.update(second, result(second, a=[9]))
    assert scheduler.update(first, result(first, a=[9])) and scheduler.update(second, result(second, a=[9]))


# ---- ends


def test_failed_row_ends_that_request_alone() -> None:
    scheduler, _ = make_scheduler(is_async=True)
    for name in ("good", "bad"):
        scheduler.add(make_request(name, [1, 2]))
    plan = planned(scheduler.schedule())
    answer = StepResult(step_id=plan.step_id, sampled_token_ids={"good": [9]}, failed={"bad": "NaN"})
    good, bad = scheduler.update(plan, answer)
    assert (bad.request_id, bad.finish_reason, bad.error) == ("bad", FinishReason.ERROR, "NaN")
    assert (good.finish_reason, good.new_token_ids) == (None, [9])
    scheduler.check_integrity()


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_wrong_number_of_tokens_ends_the_request_with_an_error(tokens: list[int]) -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    plan = planned(scheduler.schedule())
    (end,) = scheduler.update(plan, result(plan, a=tokens))
    assert end.finish_reason is FinishReason.ERROR and f"gave {len(tokens)} tokens where 1 to 1" in (end.error or "")
    assert not scheduler.has_work() and kv.usage == 0


def first_end(tokens: list[int], sampling: SamplingParams, max_tokens: int = 20) -> tuple[int, Any, Any]:
    """After how many tokens a request ends, and why."""
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens, sampling=sampling))
    for number, token in enumerate(tokens, 1):
        plan = planned(scheduler.schedule())
        (delta,) = scheduler.update(plan, result(plan, a=[token]))
        if delta.finish_reason is not None:
            return number, delta.finish_reason, delta.stop_reason
    return 0, None, None


def test_ends_by_end_token_stop_id_length_and_repetition() -> None:
    plain = {"temperature": 0.0}
    assert first_end([3, EOS], SamplingParams(**plain)) == (2, FinishReason.STOP, None)
    assert first_end([3, EOS], SamplingParams(ignore_eos=True, **plain)) == (0, None, None)
    assert first_end([3, 4, 5], SamplingParams(stop_token_ids=[4], **plain)) == (2, FinishReason.STOP, 4)
    assert first_end([3, 4, 5], SamplingParams(**plain), 2) == (2, FinishReason.LENGTH, None)
    assert first_end([3, EOS], SamplingParams(**plain), 2) == (2, FinishReason.STOP, None)
    loops = SamplingParams(repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=3), **plain)
    assert first_end([8, 3, 4, 3, 4, 3, 5], loops) == (0, None, None)
    assert first_end([8, 3, 4, 3, 4, 3, 4, 5], loops) == (7, FinishReason.REPETITION, "repetition_detected")


def test_nothing_but_length_ends_a_request_below_its_minimum() -> None:
    loops = RepetitionDetection(max_pattern_size=2, min_count=2)
    sampling = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[5], repetition_detection=loops)
    assert first_end([EOS, 5, 3, EOS], sampling) == (4, FinishReason.STOP, None)
    assert first_end([EOS, 5, 3, 5], sampling) == (4, FinishReason.STOP, 5)
    assert first_end([3, 3, 3, 3], sampling) == (4, FinishReason.REPETITION, "repetition_detected")
    assert first_end([EOS, 5, 3, 4], sampling, 4) == (4, FinishReason.LENGTH, None)


def test_tokens_after_the_end_are_cut_with_their_logprobs() -> None:
    scheduler, _ = make_scheduler(num_speculative_tokens=3)
    scheduler.add(make_request("a", [1, 2], 10))
    plan = planned(scheduler.schedule())
    scheduler.update(plan, StepResult(step_id=1, sampled_token_ids={"a": [3]}, draft_token_ids={"a": [4, EOS, 5, 6]}))
    plan = planned(scheduler.schedule())
    assert plan.draft_token_ids == {"a": [4, EOS, 5]} and plan.num_scheduled_tokens == {"a": 4}
    entry = TokenLogprobs(token_ids=[4], logprobs=[0.0], ranks=[1])
    answer = StepResult(step_id=2, sampled_token_ids={"a": [4, EOS, 5, 6]}, logprobs={"a": [entry] * 4})
    (end,) = scheduler.update(plan, answer)
    assert end.new_token_ids == [4, EOS] and end.logprobs == [entry] * 2 and end.finish_reason is FinishReason.STOP


def test_drafts_stop_before_the_last_token_of_the_request() -> None:
    for max_tokens, max_model_len, expected in ((4, 48, 2), (2, 48, 0), (20, 6, 2), (20, 48, 3)):
        scheduler, _ = make_scheduler(num_speculative_tokens=3, max_model_len=max_model_len)
        scheduler.add(make_request("a", [1, 2], max_tokens))
        plan = planned(scheduler.schedule())
        drafts = {"a": [4, 5, 6]}
        scheduler.update(plan, StepResult(step_id=1, sampled_token_ids={"a": [3]}, draft_token_ids=drafts))
        plan = planned(scheduler.schedule())
        assert len(plan.draft_token_ids.get("a", [])) == expected
        scheduler.check_integrity()


def test_drafts_are_verified_with_async_scheduling_too() -> None:
    loop, _ = make_loop(num_drafts=3, is_async=True, seed=1)
    for name in "abc":
        loop.scheduler.add(make_request(name, [ord(name) % 50, 2], 20, sampling=no_end()))
    loop.run()
    stats = loop.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_draft_tokens == sum(len(ids) for plan in loop.plans for ids in plan.draft_token_ids.values())
    assert len(loop.plans) < 20


# ---- what is reported


def test_first_delta_alone_tells_the_time_in_the_queue() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [1, 2], arrival_time_s=1.0))
    deltas = []
    for _ in range(3):
        plan = planned(scheduler.schedule())
        deltas += scheduler.update(plan, result(plan, a=[9]))
    assert [delta.queued_s is not None for delta in deltas] == [True, False, False]
    scheduler.add(make_request("b", [1, 2]))
    (end,) = scheduler.finish(["b"], FinishReason.ABORT)
    assert end.queued_s is None


def test_prompt_logprobs_are_reported_once_and_forbid_hits() -> None:
    scheduler, _ = make_scheduler(num_blocks=8, max_num_batched_tokens=6)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0, skip_reading_prefix_cache=False)
    for _ in range(2):
        scheduler.add(make_request("old", [1] * 12, 1))
        while scheduler.has_work():
            plan = planned(scheduler.schedule())
            scheduler.update(plan, result(plan, old=[9]))
    scheduler.add(make_request("a", [1] * 12, 20, sampling=sampling))
    positions: list[int] = []
    is_preempted = False
    while len(positions) < 11 or not is_preempted:
        plan = planned(scheduler.schedule())
        start = (
            plan.new_requests[0].num_computed_tokens
            if plan.new_requests
            else plan.running_requests[0].num_computed_tokens
        )
        end = start + plan.num_scheduled_tokens["a"]
        entries = [TokenLogprobs(token_ids=[i], logprobs=[0.0], ranks=[1]) for i in range(start + 1, min(end, 11) + 1)]
        answer = StepResult(
            step_id=plan.step_id, prompt_logprobs={"a": entries}, sampled_token_ids={"a": [9]} if end >= 12 else {}
        )
        for delta in scheduler.update(plan, answer):
            positions += [entry.token_ids[0] for entry in delta.prompt_logprobs or []]
        if not is_preempted and len(positions) >= 6:
            is_preempted = True
            scheduler._start_over(scheduler._running.pop())
    assert positions == list(range(1, 12))


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    loop, _ = make_loop()
    loop.scheduler.add(make_request("a", range(1, 13), 1))
    loop.run()
    loop.scheduler.add(make_request("b", range(1, 13), 1))
    skipping = SamplingParams(temperature=0.0, skip_reading_prefix_cache=True)
    loop.scheduler.add(make_request("c", range(1, 13), 1, sampling=skipping))
    loop.run()
    assert [loop.ends[name].num_cached_tokens for name in "abc"] == [0, 8, 0]
    stats = loop.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (24, 8)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (36, 3)


def test_waiting_for_room_does_not_count_as_queries() -> None:
    scheduler, _ = make_scheduler(num_blocks=8, max_num_seqs=4)
    scheduler.add(make_request("a", [1] * 12, 8, sampling=no_end()))
    scheduler.add(make_request("b", [2] * 20, 8))
    for _ in range(4):
        plan = planned(scheduler.schedule())
        scheduler.update(plan, result(plan, a=[9]))
    assert scheduler.stats().prefix_queries == 12


def test_seed_is_the_callers_or_drawn() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [1], sampling=SamplingParams(seed=5)))
    for name in "bc":
        scheduler.add(make_request(name, [1], sampling=SamplingParams()))
    first, *drawn = [new.seed for new in planned(scheduler.schedule()).new_requests]
    assert first == 5 and len({*drawn, 5}) == 3 and all(0 <= seed < 2**63 for seed in drawn)


def test_plan_tells_the_runner_what_ends_a_request() -> None:
    scheduler, _ = make_scheduler()
    sampling = SamplingParams(stop_token_ids=[4])
    scheduler.add(make_request("a", [1], sampling=sampling, bad_words_token_ids=[[3]], adapter="x"))
    (new,) = planned(scheduler.schedule()).new_requests
    assert (new.end_token_ids, new.bad_words_token_ids, new.adapter) == ([EOS, 4], [[3]], "x")


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, InvalidRequestError, "the prompt is empty"),
        ([1] * 48, {}, ContextLengthError, "has 48 tokens, but the context holds 48, output included; at most 47 fit"),
        (
            [1] * 22,
            {"num_blocks": 5},
            InvalidRequestError,
            "cache of 4 blocks holds 16 of one request, .* at most 15 fit",
        ),
        ([1] * 20, {"is_chunked_prefill": False, "max_num_batched_tokens": 8}, InvalidRequestError, "at most 8 fit"),
    ],
)
def test_request_that_can_never_be_served_is_refused_with_the_number_that_could(
    prompt: list[int], options: dict[str, Any], error: type[ClientError], message: str
) -> None:
    scheduler, _ = make_scheduler(**options)
    with pytest.raises(error, match=message) as caught:
        scheduler.add(make_request("a", prompt))
    assert caught.value.field == "prompt" and not scheduler.has_work()


def test_id_in_use_is_refused() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add(make_request("a", [1]))


def test_full_queue_refuses_and_keeps_nothing() -> None:
    """A request that starts with the next step does not wait: one seat and a queue of one take two, in any moment."""
    scheduler, _ = make_scheduler(max_num_queued_requests=1, max_num_seqs=1)
    request = make_request("a", [1])
    for name in ("a", "b"):
        scheduler.add(replace(request, request_id=name))
    for _ in range(2):
        with pytest.raises(OverloadedError, match="1 requests wait already, the limit is 1"):
            scheduler.add(replace(request, request_id="c"))
        assert scheduler.request_ids() == ["a", "b"]
        assert scheduler.schedule() is not None
    scheduler.finish(["a"], FinishReason.ABORT)
    scheduler.add(replace(request, request_id="c"))
    assert sorted(scheduler.request_ids()) == ["b", "c"]


def test_seats_that_no_block_is_left_for_are_no_room() -> None:
    scheduler, _ = make_scheduler(max_num_queued_requests=1, num_blocks=4)
    for start in (1, 21):
        scheduler.add(make_request(f"from {start}", range(start, start + 8)))
        scheduler.schedule()
    with pytest.raises(OverloadedError, match="1 requests wait"):
        scheduler.add(make_request("one more", [1]))


def test_prefix_cache_is_reset_only_while_nothing_is_held() -> None:
    loop, kv = make_loop()
    loop.scheduler.add(make_request("a", range(1, 13), 2, sampling=no_end()))
    loop.turn()
    assert not loop.scheduler.reset_prefix_cache()
    loop.run()
    assert loop.scheduler.reset_prefix_cache() and kv.usage == 0


# ---- queues and the harness


@pytest.mark.parametrize("queue", [FcfsQueue(), PriorityQueue()])
def test_queue_forgets_removed_requests_and_takes_them_again(queue: RequestQueue) -> None:
    items = [Request(spec=make_request(str(i), [1], priority=i % 2), token_ids=[1], seed=0) for i in range(500)]
    for item in items:
        queue.add(item)
    for item in items[:498]:
        queue.remove(item)
    assert [item.request_id for item in queue] == ["498", "499"] and len(queue) == 2
    queue.put_back(items[0])
    assert queue.peek() is items[0] and len(queue) == 3
    queue.remove(items[0])
    queue.add(items[0])
    expected = ["498", "499", "0"] if isinstance(queue, FcfsQueue) else ["0", "498", "499"]
    assert [item.request_id for item in queue] == expected


def test_fake_runner_finds_a_wrong_table() -> None:
    runner = FakeRunner(windows=(None,), max_num_seqs=2)
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [1] * 6, 3))
    plan = planned(scheduler.schedule())
    runner.execute(plan)
    runner.cache.clear()
    scheduler.update(plan, result(plan, a=reference([1] * 6, 1)[0]))
    with pytest.raises(AssertionError, match="holds other content"):
        runner.execute(planned(scheduler.schedule()))


def test_plan_without_a_connector_carries_no_message() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [1]))
    assert planned(scheduler.schedule()).kv_transfer is None


# ---- numbers


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_are_counted_by_their_tokens(is_async: bool) -> None:
    loop, _ = make_loop(is_async=is_async, caching=False)
    loop.scheduler.add(make_request("a", [1] * 20, 3, sampling=no_end()))
    loop.scheduler.add(make_request("b", [2] * 9, 2, sampling=no_end()))
    loop.run()
    stats = loop.scheduler.stats()
    sizes = [plan.num_tokens for plan in loop.plans]
    assert stats.num_iteration_tokens == sum(sizes) and sum(stats.iteration_token_counts) == len(sizes)
    assert sizes[0] == 29 and stats.iteration_token_counts[3] == 1, "29 tokens are in the bucket up to 32"
    assert stats.iteration_token_counts[0] == sizes.count(1)


def test_cached_prompt_tokens_are_counted_by_their_source() -> None:
    loop, _ = make_loop()
    for name in "ab":
        loop.scheduler.add(make_request(name, [5] * 14, 2, sampling=no_end()))
        loop.run()
    stats = loop.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (28, 12, 0)
    assert stats.external_queries == 0 == stats.num_waiting_deferred


def test_accepted_drafts_are_counted_by_position() -> None:
    loop, _ = make_loop(num_drafts=3)
    for name in "abc":
        loop.scheduler.add(make_request(name, [ord(name)] * 6, 12, sampling=no_end()))
    loop.run()
    stats = loop.scheduler.stats()
    assert 0 < stats.num_accepted_tokens == sum(stats.num_accepted_at) < stats.num_draft_tokens
    assert list(stats.num_accepted_at) == sorted(stats.num_accepted_at, reverse=True)
    assert 0 < stats.num_drafts <= stats.num_draft_tokens and stats.num_accepted_at[0] <= stats.num_drafts


# ---- prefixes under way


HEAD = [1, 2, 3, 4] * 6


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbet.sched.scheduler._MIN_SHARED_TOKENS", 8)


@pytest.mark.usefixtures("short_prefixes")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_burst_with_one_prefix_computes_it_once(is_async: bool) -> None:
    loop, _ = make_loop(is_async=is_async, max_num_batched_tokens=64, num_blocks=60)
    for name in "abcd":
        loop.scheduler.add(make_request(name, [*HEAD, ord(name) % 50], 3, sampling=no_end()))
    loop.run()
    computed = [plan.num_scheduled_tokens for plan in loop.plans]
    assert list(computed[0]) == ["a"]
    others = next(counts for counts in computed if "b" in counts)
    assert others["b"] == others["c"] == others["d"] == 1
    assert all(end.num_cached_tokens == len(HEAD) for name, end in loop.ends.items() if name != "a")


@pytest.mark.usefixtures("short_prefixes")
def test_a_prefix_is_waited_for_as_long_as_its_chunks_take_and_others_go_first() -> None:
    loop, _ = make_loop(max_num_batched_tokens=16, num_blocks=60)
    for name, tokens in (("a", [*HEAD, 9]), ("b", [*HEAD, 8]), ("c", [30, 31])):
        loop.scheduler.add(make_request(name, tokens, 3, sampling=no_end()))
    loop.turn()
    loop.turn()
    assert [dict(plan.num_scheduled_tokens) for plan in loop.plans[:2]] == [{"a": 16}, {"a": 9, "c": 2}]
    assert loop.scheduler.stats().num_waiting_deferred == 1
    loop.turn()
    assert loop.plans[2].num_scheduled_tokens["b"] == 1


@pytest.mark.usefixtures("short_prefixes")
def test_nobody_waits_for_a_prefix_whose_request_is_gone() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=16, num_blocks=60)
    scheduler.add(make_request("a", [*HEAD, 9]))
    scheduler.add(make_request("b", [*HEAD, 8]))
    assert list(planned(scheduler.schedule()).num_scheduled_tokens) == ["a"]
    scheduler.finish(["a"], FinishReason.ABORT)
    assert list(planned(scheduler.schedule()).num_scheduled_tokens) == ["b"]


@pytest.mark.usefixtures("short_prefixes")
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (HEAD[:6] + [9] * 19, {}),
        ([*HEAD[:12], *[9] * 30], {}),
        ([*HEAD, 8], {"cache_salt": "other"}),
        ([*HEAD, 8], {"sampling": SamplingParams(temperature=0.0, prompt_logprobs=1)}),
    ],
    ids=["short prefix", "less than half", "other salt", "no cache wanted"],
)
def test_nobody_waits_for_little(tokens: list[int], options: dict[str, Any]) -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=100, num_blocks=60)
    scheduler.add(make_request("a", [*HEAD, 9]))
    scheduler.add(make_request("b", tokens, **options))
    assert set(planned(scheduler.schedule()).num_scheduled_tokens) == {"a", "b"}
