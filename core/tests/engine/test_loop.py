"""The loop: what it does between steps, told by a core that only pretends."""

from __future__ import annotations

from typing import Any

import pytest

from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine import loop as loop_module
from rabbet.engine.loop import EngineLoop
from rabbet.engine.messages import Deltas, FromEngine, Shutdown, ToEngine, Utility, UtilityResult
from rabbet.types.outputs import FinishReason, RequestDelta


class Core:
    """A core with a number of steps to make, or one that waits for ever."""

    def __init__(self, num_steps: int = 0, *, is_stalled: bool = False) -> None:
        self.num_steps = num_steps
        self.is_waiting = is_stalled
        self.has_request = is_stalled

    def has_work(self) -> bool:
        return self.num_steps > 0 or self.has_request

    def step(self) -> list[RequestDelta]:
        if self.is_waiting:
            return []
        self.num_steps -= 1
        return [RequestDelta(request_id="r", new_token_ids=[self.num_steps])]

    def abort_all(self) -> list[RequestDelta]:
        self.num_steps, self.has_request = 0, False
        return [RequestDelta(request_id="r", finish_reason=FinishReason.ABORT)]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=1, num_waiting=2, kv_usage=0.5, prefix_queries=0, prefix_hits=0, num_preemptions=0
        )

    def reset_prefix_cache(self) -> bool:
        raise RuntimeError("no")

    def check_integrity(self) -> None:
        raise AssertionError("a block is lost")


class Wire:
    """Hands out what was prepared, then a shutdown; keeps what is sent and how long was waited."""

    def __init__(self, *batches: list[ToEngine], timeout_s: float = 0.0) -> None:
        self.batches = [*batches, [Shutdown(timeout_s=timeout_s)]]
        self.sent: list[FromEngine] = []
        self.waits: list[float] = []

    def receive(self, timeout_s: float) -> list[ToEngine]:
        self.waits.append(timeout_s)
        return self.batches.pop(0) if self.batches else []


def run(core: Any, wire: Wire) -> EngineLoop:
    loop = EngineLoop(core, wire.receive, wire.sent.append)
    loop.run()
    return loop


def test_it_does_not_wait_while_there_is_work_and_does_without() -> None:
    wire = Wire([], [], [])
    run(Core(2), wire)
    assert wire.waits[:2] == [0.0, 0.0] and wire.waits[2] > 0


def test_it_sleeps_a_little_while_all_requests_wait_for_something() -> None:
    wire = Wire([], [])
    run(Core(is_stalled=True), wire)
    assert wire.waits[0] == 0.0 and 0 < wire.waits[1] < 0.1


def test_a_shutdown_with_time_finishes_the_work_first() -> None:
    wire = Wire(timeout_s=1000.0)
    run(Core(3), wire)
    tokens = [delta.new_token_ids for message in wire.sent if isinstance(message, Deltas) for delta in message.deltas]
    assert tokens == [[2], [1], [0], []]


def test_a_shutdown_without_time_aborts_at_once() -> None:
    wire = Wire()
    run(Core(3), wire)
    assert [m.deltas[0].finish_reason for m in wire.sent if isinstance(m, Deltas)] == [FinishReason.ABORT]


@pytest.mark.parametrize(
    ("name", "error"),
    [("check_integrity", "a block is lost"), ("reset_prefix_cache", "no"), ("__init__", "there is no call '__init__'")],
)
def test_a_call_that_fails_is_answered(name: str, error: str) -> None:
    wire = Wire([Utility(call_id=7, name=name)])
    run(Core(), wire)
    assert UtilityResult(call_id=7, value=None, error=error) in wire.sent


def test_a_wait_for_nothing_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loop_module, "_STALL_LINE_S", 0.0)
    run(Core(is_stalled=True), Wire([]))
    assert "1 requests run, 2 wait, 50% of the KV cache is held" in caplog.text


def test_the_heartbeat_is_calm_without_work() -> None:
    loop = EngineLoop(Core(), Wire().receive, lambda _message: None)  # type: ignore[arg-type]
    assert loop.heartbeat().busy_s == 0.0 and loop.heartbeat().stats.num_waiting == 2
