"""The engine's step: what fails ends with what it belongs to, and every request ends once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbet.config.load import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.config.resolved import ResolvedConfig
from rabbet.engine.core import EngineCore
from rabbet.errors import ConfigError, EngineDeadError, RequestFailedError
from rabbet.types.outputs import FinishReason, RequestDelta
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams


@pytest.fixture(scope="module")
def resolved(null: ModuleType, model_dir: Path, options: dict[str, Any]) -> ResolvedConfig:
    return resolve(engine_config_from_kwargs(str(model_dir), **options), is_server=False)


@pytest.fixture
def core(resolved: ResolvedConfig) -> EngineCore:
    return EngineCore(resolved)


def request_of(request_id: str, prompt: list[int], max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
    )


def drain(core: EngineCore, deltas: list[RequestDelta] | None = None) -> dict[str, list[RequestDelta]]:
    """Step until nothing is left; deltas by request. The books balance after every step."""
    news = list(deltas or ())
    while core.has_work():
        news += core.step()
        core.check_integrity()
    by_id: dict[str, list[RequestDelta]] = {}
    for delta in news:
        by_id.setdefault(delta.request_id, []).append(delta)
    return by_id


def tokens(deltas: list[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.new_token_ids]


def ends(deltas: list[RequestDelta]) -> list[FinishReason]:
    return [delta.finish_reason for delta in deltas if delta.finish_reason is not None]


@pytest.mark.parametrize("is_async", [True, False])
def test_tokens_do_not_depend_on_the_neighbours(null: ModuleType, resolved: ResolvedConfig, is_async: bool) -> None:
    core = EngineCore(replace(resolved, is_async=is_async))
    prompts = {f"r{i}": list(range(1, 4 + i * 9)) for i in range(12)}
    news = drain(core, [d for name, prompt in prompts.items() for d in core.add(request_of(name, prompt))])
    assert {name: tokens(deltas) for name, deltas in news.items()} == {
        name: null.tokens_of(prompt, 5) for name, prompt in prompts.items()
    }
    assert all(ends(deltas) == [FinishReason.LENGTH] for deltas in news.values())


@pytest.mark.parametrize("kind", ["FAIL_ROW", "FAIL_STEP"])
def test_a_failure_in_the_runner_ends_its_requests_only(null: ModuleType, core: EngineCore, kind: str) -> None:
    core.add(request_of("good", [1, 2], max_tokens=30))
    for _ in range(3):
        core.step()
    core.add(request_of("bad", [getattr(null, kind), 5]))
    news = drain(core)
    assert ends(news["bad"]) == [FinishReason.ERROR]
    assert "0xdeadbeef" not in str(news["bad"][-1].error)
    if kind == "FAIL_ROW":
        assert ends(news["good"]) == [FinishReason.LENGTH]
    core.add(request_of("later", [3]))
    assert tokens(drain(core)["later"]) == null.tokens_of([3], 5)


def test_an_exception_while_adding_ends_that_request(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core.add(request_of("good", [1]))
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "add", _raiser(KeyError("boom")))
        deltas = core.add(request_of("bad", [1]))
    assert [(d.request_id, d.finish_reason, d.error_kind) for d in deltas] == [("bad", FinishReason.ERROR, None)]
    assert ends(drain(core)["good"]) == [FinishReason.LENGTH]


def test_refusals_say_whose_fault_it_is(core: EngineCore) -> None:
    (wrong,) = core.add(request_of("wrong", [300]))
    (empty,) = core.add(request_of("empty", []))
    assert wrong.error_kind == empty.error_kind == "InvalidRequestError"
    assert not core.has_work()


def test_a_full_queue_refuses_as_overload(resolved: ResolvedConfig) -> None:
    scheduler = replace(resolved.config.scheduler, max_num_queued_reqs=1)
    core = EngineCore(replace(resolved, max_num_seqs=1, config=replace(resolved.config, scheduler=scheduler)))
    kinds = [d.error_kind for i in range(4) for d in core.add(request_of(f"r{i}", [1]))]
    assert kinds == ["OverloadedError"] * 2
    assert len(drain(core)) == 2


def test_a_second_request_with_an_id_is_dropped_and_the_first_goes_on(core: EngineCore) -> None:
    core.add(request_of("same", [1]))
    assert core.add(request_of("same", [2])) == []
    assert ends(drain(core)["same"]) == [FinishReason.LENGTH]


def test_planning_that_names_its_request_ends_that_one(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core.add(request_of("good", [1]))
    core.add(request_of("bad", [2]))
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "schedule", _raiser(RequestFailedError("grammar", request_id="bad")))
        deltas = core.step()
    assert [(d.request_id, d.finish_reason) for d in deltas] == [("bad", FinishReason.ERROR)]
    assert ends(drain(core)["good"]) == [FinishReason.LENGTH]


def test_planning_that_fails_without_a_name_ends_all_and_the_engine_goes_on(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.add(request_of("a", [1]))
    core.add(request_of("b", [2]))
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "schedule", _raiser(ZeroDivisionError()))
        deltas = core.step()
    assert [d.finish_reason for d in deltas] == [FinishReason.ERROR] * 2
    core.add(request_of("c", [3]))
    assert ends(drain(core)["c"]) == [FinishReason.LENGTH]


def test_news_that_an_exception_lost_are_made_up_for(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """``update`` ends a request and then raises: its last delta is gone, and it still gets one."""
    core.add(request_of("lost", [1], max_tokens=1))
    original = core.scheduler.update

    def update(plan: Any, result: Any) -> Any:
        original(plan, result)
        raise RuntimeError("after the fact")

    monkeypatch.setattr(core.scheduler, "update", update)
    assert ends(drain(core)["lost"]) == [FinishReason.ERROR]


def test_a_scheduler_that_ends_a_request_twice_is_heard_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core.add(request_of("twice", [1], max_tokens=1))
    original = core.scheduler.update
    monkeypatch.setattr(core.scheduler, "update", lambda plan, result: original(plan, result) * 2)
    assert ends(drain(core)["twice"]) == [FinishReason.LENGTH]


def test_an_executor_that_is_gone_ends_the_engine(null: ModuleType, core: EngineCore) -> None:
    core.add(request_of("last", [null.DEAD_EXECUTOR]))
    with pytest.raises(EngineDeadError, match="rank 0 has ended"):
        drain(core)
    assert [d.finish_reason for d in core.abort_all(FinishReason.ERROR, "dead")] == [FinishReason.ERROR]


def test_failing_requests_one_after_the_other_do_not_end_the_engine(null: ModuleType, core: EngineCore) -> None:
    for index in range(40):
        core.add(request_of(f"r{index}", [null.FAIL_STEP]))
        assert ends(drain(core)[f"r{index}"]) == [FinishReason.ERROR]


def test_planning_that_fails_with_nobody_to_blame_ends_the_engine(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.scheduler, "schedule", _raiser(ZeroDivisionError()))
    with pytest.raises(EngineDeadError, match="planning a step fails again and again"):
        for _ in range(100):
            core.step()


def test_aborts_end_what_is_open_and_ignore_the_rest(core: EngineCore) -> None:
    core.add(request_of("a", [1], max_tokens=100))
    core.step()
    assert [d.finish_reason for d in core.abort(["a", "never", "a"])] == [FinishReason.ABORT]
    assert core.abort(["a"]) == []
    drain(core)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(data=st.data())
def test_every_accepted_request_ends_exactly_once(
    null: ModuleType, resolved: ResolvedConfig, data: st.DataObject
) -> None:
    """Random traffic over an executor and a scheduler that fail at random."""
    core = EngineCore(replace(resolved, is_async=data.draw(st.booleans()), max_num_seqs=3))
    faults = data.draw(st.lists(st.sampled_from(["add", "schedule", "update", "finish-late"]), max_size=3))
    _sabotage(core, faults, data)
    news: list[RequestDelta] = []
    accepted: list[str] = []
    first = st.sampled_from([1, 2, 3, 4, null.FAIL_STEP, null.FAIL_ROW, 299, 300])
    for index in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "abort"]))
        if action == "add":
            accepted.append(f"r{index}")
            news += core.add(request_of(f"r{index}", [data.draw(first), 7, 8], data.draw(st.integers(1, 6))))
        elif action == "abort" and accepted:
            news += core.abort([data.draw(st.sampled_from(accepted))])
        else:
            news += core.step()
    for _ in range(300):
        if not core.has_work():
            break
        news += core.step()
    news += core.abort_all()
    final = [delta.request_id for delta in news if delta.finish_reason is not None]
    assert sorted(final) == sorted(accepted)
    seen: set[str] = set()
    for delta in news:
        assert delta.request_id not in seen, "nothing comes after the end"
        seen |= {delta.request_id} if delta.finish_reason else set()


def _sabotage(core: EngineCore, faults: list[str], data: st.DataObject) -> None:
    def sometimes(call: Callable[..., Any], *, late: bool = False) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            fails = data.draw(st.integers(0, 3)) == 0
            if fails and not late:
                raise RuntimeError("sabotage")
            result = call(*args)
            if fails:
                raise RuntimeError("sabotage, too late")
            return result

        return wrapped

    scheduler: Any = core.scheduler
    for fault in faults:
        name = {"finish-late": "update"}.get(fault, fault)
        setattr(scheduler, name, sometimes(getattr(scheduler, name), late=fault == "finish-late"))


def test_auto_takes_the_context_that_fits(resolved: ResolvedConfig) -> None:
    core = EngineCore(
        replace(resolved, is_max_model_len_auto=True, max_model_len=1 << 20, kv_cache_memory_bytes=16 * 41)
    )
    assert core.info.max_model_len == 160
    assert core.info.max_concurrency == 1.0
    assert core.resolved.max_model_len == 160


def test_a_cache_too_small_for_one_request_says_what_would_fit(
    resolved: ResolvedConfig, null: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(null.NullExecutor, "shutdown", lambda self: closed.append(True))
    with pytest.raises(
        ConfigError, match=r"one request of 512 tokens needs .* largest --max-model-len that fits is 160"
    ):
        EngineCore(replace(resolved, kv_cache_memory_bytes=16 * 41))
    assert closed == [True]


def test_the_start_says_how_much_fits(resolved: ResolvedConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="rabbet.engine")
    phases: list[str] = []
    EngineCore(replace(resolved, kv_cache_memory_bytes=16 * 257), on_phase=phases.append)
    assert (
        "KV cache: 1024 tokens in 256 blocks (0.00 GiB); maximum concurrency for 512 tokens per request: 2.00x"
        in caplog.text
    )
    assert phases == ["loading the model", "measuring memory", "allocating the KV cache and warming up"]


def test_async_plans_one_step_ahead(
    resolved: ResolvedConfig, null: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second plan is made while the first has no result."""
    flights: list[int] = []
    original = null.NullExecutor.execute
    waiting: list[Future[Any]] = []

    def execute(self: Any, plan: Any) -> Future[Any]:
        waiting.append(original(self, plan))
        flights.append(plan.step_id)
        return waiting[-1]

    monkeypatch.setattr(null.NullExecutor, "execute", execute)
    core = EngineCore(replace(resolved, is_async=True))
    core.add(request_of("r", [1]))
    core.step()
    assert flights == [1, 2]
    drain(core)
    sync = EngineCore(replace(resolved, is_async=False))
    sync.add(request_of("r", [1]))
    flights.clear()
    sync.step()
    assert flights == [1]


def _raiser(error: Exception) -> Callable[..., Any]:
    def raising(*_: Any) -> Any:
        raise error

    return raising
