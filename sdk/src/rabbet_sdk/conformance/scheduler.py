"""The suite of schedulers: budgets are kept, nobody starves, everybody gets its own tokens and one end.

Claims that are read, in ``features``: ``async`` (plans a step ahead of results), ``prefix_cache`` (uses hits of the KV
manager), ``drafts`` (has drafts verified), ``kv_connector``, ``priority`` (lower numbers go first). What is not claimed must
be left alone: requests are then served in the order of their arrival, computed whole, one token a step; and a scheduler
without ``kv_connector`` refuses a context that has one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rabbet.errors import ClientError, OverloadedError, RabbetError
from rabbet.types.outputs import FinishReason
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import RepetitionDetection
from rabbet_sdk.conformance._scheduler_rig import BLOCK, MAX_LEN, Loop, answer, make_request
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject

__all__ = ["SchedulerConformance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traffic:
    """One setup of the random runs: fields of the context, blocks, and how prompts look."""

    settings: dict[str, Any] = field(default_factory=dict)
    longest_prompt: int = 30
    longest: int = MAX_LEN


_SETUPS = {
    "plain": _Traffic(),
    "ahead": _Traffic(settings={"is_async": True}),
    "small_steps": _Traffic(settings={"max_num_batched_tokens": 5}),
    "small_steps_ahead": _Traffic(settings={"max_num_batched_tokens": 5, "is_async": True}),
    "whole_prompts": _Traffic(settings={"is_chunked_prefill": False, "max_num_batched_tokens": 30}),
    "few_blocks": _Traffic(settings={"num_blocks": 15}),
    "few_blocks_ahead": _Traffic(settings={"num_blocks": 15, "is_async": True}),
    "few_blocks_no_reserve": _Traffic(settings={"num_blocks": 15, "reserve_full_prompt": False, "is_async": True}),
    "pool_below_context": _Traffic(settings={"num_blocks": 9}, longest_prompt=20, longest=8 * BLOCK),
    "no_cache": _Traffic(settings={"caching": False, "num_blocks": 20}),
    "drafts": _Traffic(settings={"num_speculative_tokens": 3}),
    "drafts_ahead": _Traffic(settings={"num_speculative_tokens": 3, "is_async": True, "num_blocks": 17}),
}
_CONNECTED = {
    "loads": _Traffic(settings={"fails": 0}),
    "loads_ahead": _Traffic(settings={"fails": 0, "is_async": True, "num_blocks": 20}),
    "failed_loads": _Traffic(settings={"fails": 3, "kv_load_failure_policy": "recompute"}),
    "failed_loads_ahead": _Traffic(settings={"fails": 3, "kv_load_failure_policy": "recompute", "is_async": True}),
    "failed_loads_end": _Traffic(settings={"fails": 3, "kv_load_failure_policy": "fail"}),
}
_P = (11, 12, 13, 14, 15)


class SchedulerConformance(PluginConformance):
    """Subclass and name the plugin.

    Attributes:
        num_runs: Random runs of each setup.
    """

    kind = "scheduler"
    num_runs: ClassVar[int] = 6
    knobs = PluginConformance.knobs | {"num_runs"}

    @classmethod
    def traffic_cases(cls, claims: Claims) -> list[Case]:
        """Setups of the random runs; those with a connector are for whoever claims it."""
        lacking = "" if claims.has("kv_connector") else "feature kv_connector"
        found = [Case(id=name, value=setup) for name, setup in _SETUPS.items()]
        return found + [Case(id=name, value=setup, unclaimed=lacking) for name, setup in _CONNECTED.items()]

    @pytest.fixture
    def loop(self, subject: Subject) -> Loop:
        """A loop with room for everybody."""
        return Loop(subject.plugin_class)

    # ---- everybody gets its own tokens and one end

    @level(3)
    @cases("traffic_cases")
    def test_everybody_gets_its_own_tokens_and_one_end(self, subject: Subject, case: Case) -> None:
        """Random arrivals and aborts; plans keep the budgets, blocks hold what they should, nothing is left at the end."""
        for seed in range(self.num_runs):
            loop = Loop(subject.plugin_class, seed=seed, **case.value.settings)
            _drive(loop, random.Random(seed), case.value)

    @level(3)
    def test_nobody_starves(self, subject: Subject) -> None:
        """A long prompt, and one that needs many blocks, end while new requests of their rank keep coming."""
        loop = Loop(subject.plugin_class, num_blocks=16, max_num_batched_tokens=8)
        loop.add(make_request("first", [21] * 30, 12, ignore_eos=True))
        for number in range(120):
            loop.add(make_request(f"r{number}", [number % 40, 3, 5], 4, ignore_eos=True, arrival_time_s=1.0 + number))
            if number == 2:
                loop.add(make_request("second", [22] * 40, 4, ignore_eos=True, arrival_time_s=3.5))
            loop.turn()
        missing = {"first", "second"} - set(loop.ends)
        assert not missing, f"after 120 steps these still wait: {', '.join(sorted(missing))}"
        loop.run()

    def test_who_comes_first_goes_first(self, loop: Loop, subject: Subject) -> None:
        """Order of arrival among equals; by number if priority is claimed, and not at all otherwise."""
        is_in_turn = not subject.claims.has("priority")
        for number, priority in enumerate([5, 5, 1, 5, -3, 0]):
            loop.add(
                make_request(f"r{number}", _P, 3, priority=priority, arrival_time_s=float(number), ignore_eos=True)
            )
        loop.run()
        order = list(dict.fromkeys(new.request_id for plan in loop.plans for new in plan.new_requests))
        wanted = [f"r{n}" for n in (range(6) if is_in_turn else (4, 5, 2, 0, 1, 3))]
        assert order == wanted, f"admitted as {order}; {wanted} is due"

    # ---- requests come and go

    def test_what_can_never_be_served_is_refused(self, subject: Subject) -> None:
        """With a message, at once, and nothing of it is kept."""
        small = Loop(subject.plugin_class, num_blocks=6)
        whole = Loop(subject.plugin_class, is_chunked_prefill=False, max_num_batched_tokens=16)
        small.add(make_request("here", _P))
        for loop, request in (
            (small, make_request("empty", [])),
            (small, make_request("too long", [9] * MAX_LEN)),
            (small, make_request("no blocks", [9] * 5 * BLOCK)),
            (small, make_request("no tokens", _P, 0)),
            (small, make_request("here", _P)),
            (whole, make_request("no step", [9] * 17)),
        ):
            before = loop.scheduler.request_ids()
            with pytest.raises(ClientError) as raised:
                loop.scheduler.add(request)
            assert str(raised.value), f"{request.request_id}: no message"
            assert loop.scheduler.request_ids() == before, f"{request.request_id} is refused and kept"
        small.run()
        assert set(small.ends) == {"here"}
        small.add(make_request("fits", [9] * (5 * BLOCK - 1)))
        small.run()

    def test_a_full_queue_says_so(self, subject: Subject) -> None:
        """``OverloadedError`` beyond ``max_num_queued_requests``; room again afterwards."""
        loop = Loop(subject.plugin_class, max_num_queued_requests=2, max_num_seqs=1)
        taken = []
        with pytest.raises(OverloadedError):
            for number in range(9):
                loop.add(make_request(f"r{number}", _P))
                taken.append(number)
        assert len(taken) in (2, 3), f"{len(taken)} requests were taken; two may wait and one has a seat"
        assert loop.scheduler.request_ids() == [f"r{n}" for n in taken]
        loop.run()
        loop.add(make_request("later", _P))
        loop.run()

    @pytest.mark.parametrize("is_async", [False, True])
    def test_ending_from_outside(self, subject: Subject, is_async: bool) -> None:
        """Waiting, just planned or running: one delta with the reason, blocks at once, ids usable again."""
        loop = Loop(subject.plugin_class, max_num_seqs=2, is_async=is_async)
        for name in ("running", "planned", "waiting"):
            loop.add(make_request(name, _P, ignore_eos=True))
        loop.turn()
        loop.plan()
        loop.finish(["running", "unknown", "waiting", "running"], FinishReason.ERROR, "why")
        ended = {name: (end.finish_reason, end.error) for name, end in loop.ends.items()}
        assert ended == dict.fromkeys(("running", "waiting"), (FinishReason.ERROR, "why"))
        loop.finish(["running"])
        assert loop.scheduler.request_ids() == ["planned"]
        request = make_request("running", [31, 32], ignore_eos=True)
        del loop.ends["running"], loop.outputs["running"]
        loop.scheduler.add(request)
        loop.run()
        assert loop.outputs["running"] == answer(request)[0], "the second request of this id has tokens of the first"
        assert loop.ends["planned"].finish_reason is FinishReason.LENGTH and not loop.scheduler.has_work()

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_failed_row_ends_alone(self, subject: Subject, is_async: bool) -> None:
        """With ``ERROR`` and the runner's message; its neighbours go on."""
        loop = Loop(subject.plugin_class, is_async=is_async)
        requests = [make_request(name, _P, ignore_eos=True) for name in ("good", "bad")]
        for request in requests:
            loop.add(request)
        loop.turn()
        loop.runner.failing.add("bad")
        loop.run()
        assert (loop.ends["bad"].finish_reason, loop.ends["bad"].error) == (FinishReason.ERROR, "NaN in the logits")
        assert loop.outputs["good"] == answer(requests[0])[0]

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize(
        "options",
        [
            {}, {"ignore_eos": True}, {"stop_token_ids": [3, 30]}, {"stop_token_ids": [30], "ignore_eos": True},
            {"min_tokens": 6}, {"min_tokens": 4, "stop_token_ids": [3]}, {"max_tokens": 1}, {"max_tokens": 500},
            {"ignore_eos": True, "repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=2)},
        ],
        ids=["end_token", "ignored", "stop_id", "stop_id_alone", "minimum", "minimum_stop", "one", "context", "repetition"],
    )  # fmt: skip
    def test_ends_mean_what_the_request_says(self, subject: Subject, options: dict[str, Any], is_async: bool) -> None:
        """Tokens up to the end and no further, the reason, and the stop id where one ended it."""
        loop = Loop(subject.plugin_class, is_async=is_async, max_num_seqs=30, num_blocks=400)
        requests = [make_request(f"r{n}", [n, 5], **{"max_tokens": 20, **options}) for n in range(28)]
        for request in requests:
            loop.add(request)
        loop.run()
        for request in requests:
            name, (tokens, reason) = request.request_id, answer(request)
            end = loop.ends[name]
            assert (loop.outputs[name], end.finish_reason) == (tokens, reason), f"prompt {request.prompt_token_ids}"
            is_stop_id = reason is FinishReason.STOP and tokens[-1] not in request.eos_token_ids
            assert not is_stop_id or end.stop_reason == tokens[-1], f"{name}: stop_reason {end.stop_reason}"

    # ---- what is claimed, and nothing else

    @level(2)
    def test_prefixes_are_found_if_claimed(self, subject: Subject) -> None:
        """The second of two equal prompts is computed from its last block on; whole if nothing is claimed."""
        loop = Loop(subject.plugin_class)
        for name in ("a", "b"):
            loop.add(make_request(name, [8] * 17))
            loop.run()
        (computed,) = [
            new.num_computed_tokens for plan in loop.plans for new in plan.new_requests if new.request_id == "b"
        ]
        assert computed == (16 if subject.claims.has("prefix_cache") else 0), f"{computed} tokens came from the cache"
        assert loop.ends["b"].num_cached_tokens == computed
        assert loop.scheduler.reset_prefix_cache()
        loop.add(make_request("c", [8] * 17))
        loop.turn()
        assert not loop.scheduler.reset_prefix_cache(), "the cache is reset while a request holds blocks"
        loop.run()

    @level(2)
    def test_prompt_logprobs_are_whole(self, subject: Subject) -> None:
        """Positions from a cache have no logits: whoever asks for them is computed anew, each position told once."""
        loop = Loop(subject.plugin_class, max_num_batched_tokens=6)
        for name in ("a", "b"):
            loop.add(make_request(name, [8] * 17, prompt_logprobs=1))
            loop.run()
        assert loop.prompt_logprobs == {"a": 16, "b": 16}

    @level(2)
    def test_plans_ahead_if_claimed(self, subject: Subject) -> None:
        """Two steps of one request under way; one if nothing is claimed, and never two where the engine allows one."""
        loop = Loop(subject.plugin_class, is_async=True)
        loop.add(make_request("a", _P, 20, ignore_eos=True))
        loop.run()
        assert loop.deepest == (2 if subject.claims.has("async") else 1), f"{loop.deepest} plans under way"
        steps = len(loop.plans)
        assert steps == 20, f"{steps} steps for 20 tokens"

    @level(2)
    def test_drafts_save_steps_if_claimed(self, subject: Subject) -> None:
        """Right drafts are accepted and counted; they are not asked for if nothing is claimed."""
        loop = Loop(subject.plugin_class, num_speculative_tokens=4)
        loop.runner.rng.random = lambda: 0.0  # type: ignore[method-assign]
        loop.add(make_request("a", _P, 20, ignore_eos=True))
        loop.run()
        stats = loop.scheduler.stats()
        if not subject.claims.has("drafts"):
            assert not any(plan.draft_token_ids for plan in loop.plans), "drafts are verified, though it is not claimed"
            return
        assert len(loop.plans) < 20, "right drafts have saved no step"
        drafted = sum(len(ids) for plan in loop.plans for ids in plan.draft_token_ids.values())
        assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (drafted, 20 - len(loop.plans))

    @level(2)
    def test_a_connector_is_used_or_refused(self, subject: Subject) -> None:
        """Claimed: its tokens are not computed, its word reaches the client. Otherwise: no engine starts with one."""
        if not subject.claims.has("kv_connector"):
            with pytest.raises(RabbetError):
                Loop(subject.plugin_class, fails=0)
            return
        loop = Loop(subject.plugin_class, fails=0)
        for name in ("a", "b"):
            loop.add(make_request(name, [*_P, *range(12)], cache_salt=name))
            loop.run()
            assert loop.ends[name].kv_transfer_params == {"from": name}
        computed = [new.num_computed_tokens for plan in loop.plans for new in plan.new_requests]
        assert computed == [16, 16], f"{computed} tokens were loaded; 16 are offered"

    # ---- budgets and books

    def test_long_prompts_are_capped(self, subject: Subject) -> None:
        """No more than ``long_prefill_token_threshold`` tokens of one request a step while another one is there."""
        loop = Loop(subject.plugin_class, long_prefill_token_threshold=6)
        for name in ("a", "b"):
            loop.add(make_request(name, [*range(30), ord(name)]))
        loop.turn()
        assert loop.plans[0].num_scheduled_tokens == {"a": 6, "b": 6}
        loop.run()

    def test_stats_add_up(self, subject: Subject) -> None:
        """Gauges while it runs, counters at the end."""
        loop = Loop(subject.plugin_class, max_num_seqs=2)
        for number in range(5):
            loop.add(make_request(f"r{number}", [number] * 9, 6, ignore_eos=True))
        loop.turn()
        stats = loop.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 3, 1)
        assert stats.kv_usage == pytest.approx(loop.kv.usage)
        loop.run()
        stats = loop.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
        assert stats.num_steps == len(loop.plans)
        assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (45, 30)

    @level(3)
    def test_two_schedulers_share_no_state(self, subject: Subject) -> None:
        """Turn by turn, each with its own requests of the same ids."""
        loops = [Loop(subject.plugin_class, seed=seed) for seed in (0, 1)]
        requests = [make_request(f"r{n}", [n, 2]) for n in range(4)]
        for number, request in enumerate(requests):
            loops[number % 2].add(request)
        for _ in range(4):
            for loop in loops:
                loop.turn()
        for loop, own in zip(loops, (requests[::2], requests[1::2]), strict=True):
            loop.run()
            assert loop.outputs == {request.request_id: answer(request)[0] for request in own}

    @level(4)
    def test_an_engine_says_the_same(self, subject: Subject, tmp_path: Path) -> None:
        """A real engine with this scheduler answers as the model says, in steps of any size."""
        from rabbet_sdk.fakes.engine import TinyEngine
        from rabbet_sdk.fakes.model import END

        script = [([5, 6, 7], [10, 11, 10, 9]), ([5, 6, 8] * 15, [20, 3, 20]), ([5, 6, 8] * 15 + [9], [4] * 12)]
        script += [([number, 5] * 9, [number, 4, number]) for number in range(30, 42)]
        for options in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}, {"num_gpu_blocks_override": 9}):
            with TinyEngine(tmp_path, script=script, scheduling_policy=subject.entry.name, **options) as engine:
                answers = engine.generate([prompt for prompt, _ in script], max_tokens=20)
                assert answers == [[*output, END] for _, output in script]


def _drive(loop: Loop, rng: random.Random, setup: _Traffic) -> None:
    """Random traffic until all have ended, and the answers against what each request gets alone."""
    heads = [[rng.randrange(40) for _ in range(BLOCK)] for _ in range(3)]
    requests: dict[str, EngineRequest] = {}
    for number in range(60):
        if rng.random() < 0.5:
            prompt = [token for _ in range(rng.randint(0, 5)) for token in rng.choice(heads)]
            prompt += [rng.randrange(40) for _ in range(rng.randint(1, 10))]
            request = make_request(
                f"r{number}", prompt[: setup.longest_prompt], rng.randint(1, 18), priority=rng.randrange(3),
                arrival_time_s=float(number), cache_salt=rng.choice([None, None, "salt"]),
            )  # fmt: skip
            requests[request.request_id] = request
            loop.add(request)
        if rng.random() < 0.3 and not loop.flights:
            # So that ends come while a step is under way, without async scheduling too.
            loop.plan()
        if requests and rng.random() < 0.08:
            loop.finish([rng.choice(list(requests)), "unknown"])
        loop.turn()
    loop.run()
    assert set(loop.ends) == set(requests), "a request never ended"
    for name, end in loop.ends.items():
        tokens, reason = answer(requests[name], setup.longest)
        got = loop.outputs[name]
        if end.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert got == tokens[: len(got)], f"{name} has tokens of somebody else"
            may_fail = "fails" in setup.settings and setup.settings.get("kv_load_failure_policy") == "fail"
            assert end.finish_reason is FinishReason.ABORT or may_fail, f"{name} fails: {end.error}"
        else:
            assert (got, end.finish_reason) == (tokens, reason), f"{name} answers otherwise than alone"
    assert sum(end.num_preemptions for end in loop.ends.values()) == loop.scheduler.stats().num_preemptions
