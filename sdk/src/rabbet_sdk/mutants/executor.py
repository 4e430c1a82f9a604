"""Executors with one fault each, on top of the strict twin."""
# ruff: noqa: ARG005 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rabbet.contracts import register_executor
from rabbet.errors import EngineDeadError, RabbetError
from rabbet.types.outputs import StepResult
from rabbet_sdk.mutants.base import planter
from rabbet_sdk.strict.executor import StrictExecutor

__all__ = ["MUTANTS"]

_plant = planter(globals(), register_executor, StrictExecutor)
_make, _load, _shutdown = StrictExecutor.__init__, StrictExecutor.load, StrictExecutor.shutdown


def _waits(self: Any, plan: Any) -> Any:
    future = StrictExecutor.execute(self, plan)
    future.exception()
    return future


def _two_threads(self: Any, config: Any) -> None:
    _make(self, config)
    self.thread = ThreadPoolExecutor(max_workers=2)


def _run_or_nothing(self: Any, plan: Any) -> Any:
    try:
        return self.runner.execute(plan)
    except RuntimeError:
        return StepResult(step_id=plan.step_id)


def _load_or_nothing(self: Any) -> Any:
    try:
        return _load(self)
    except (ValueError, RabbetError):
        return {}


def _shuts_down_once(self: Any) -> None:
    self.thread.submit(self.runner.close).result()
    _shutdown(self)


def _end() -> EngineDeadError:
    return EngineDeadError("the executor is shut down")


def _leaves_thread(self: Any) -> None:
    if self.death is None:
        self.thread.submit(self.runner.close).result()
        self.death = _end()


def _forgets_waiting(self: Any) -> None:
    if self.thread is not None:
        # What runs is abandoned, and what comes of it reaches nobody.
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.thread, self.death = None, _end()


def _unanswered(self: Any, plan: Any) -> Any:
    answer: Future[StepResult] = Future()
    self.thread.submit(self.runner.execute, plan).add_done_callback(
        lambda future: answer.set_result(future.result()) if self.thread is not None and self.death is None else None
    )
    return answer


def _dies_first(self: Any) -> None:
    self.death = self.death or _end()
    _shutdown(self)


_helpers: list[Any] = []


def _with_helper(self: Any, config: Any) -> None:
    _make(self, config)
    # It ends with its input, which this process holds.
    _helpers.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE))


_first: list[Any] = []


def _one_runner(self: Any, config: Any) -> None:
    _make(self, config)
    _first.append(self)
    if len(_first) > 1:
        self.runner, self.thread = _first[-2].runner, _first[-2].thread


def _other_step(self: Any, plan: Any) -> Any:
    return self.thread.submit(lambda: replace(self.runner.execute(plan), step_id=plan.step_id - 1))


def _loses_its_runner(self: Any, future: Any) -> None:
    if future.exception():
        self.runner = SimpleNamespace(close=self.runner.close)


_STEPS, _ORDER = "steps_give_what_the_model_says", "execute_returns_at_once_and_steps_keep_their_order"
_FAILURE, _ENDS = "a_failure_is_told", "shutdown_ends_everything"
MUTANTS = (
    _plant("waits", _ORDER, "the scheduler stands still while a step runs", execute=_waits),
    _plant("overtakes", _ORDER, "a pool of threads for one runner", __init__=_two_threads),
    _plant("swallows_failure", _FAILURE, "LMCache#2973: an empty result for an error",
           execute=lambda self, plan: self.thread.submit(_run_or_nothing, self, plan)),
    _plant("dead_in_silence", _FAILURE, "all later steps fail, and check_health says nothing", note=_loses_its_runner),
    _plant("loads_nothing", "a_model_that_cannot_load_is_told", "an error at the start becomes an empty model",
           load=_load_or_nothing),
    _plant("shuts_down_once", _ENDS, "two owners close it", shutdown=_shuts_down_once),
    _plant("thread_stays", _ENDS, "a server that reloads grows by a thread each time", shutdown=_leaves_thread),
    _plant("helper_stays", _ENDS, "a process outlives its engine", __init__=_with_helper),
    _plant("abandons_step", _ENDS, "the end does not wait for what runs", shutdown=_forgets_waiting),
    _plant("leaves_unanswered", _ENDS, "a result that comes at the end is dropped", execute=_unanswered, shutdown=_dies_first),
    _plant("one_runner", "two_executors_share_no_state", "the runner in a module's global", __init__=_one_runner),
    _plant("result_of_another", _STEPS, "results are told one step late", execute=_other_step),
    _plant("no_memory", _STEPS, "a report of the rank that has nothing",
           profile_memory=lambda self: replace(StrictExecutor.profile_memory(self), total_bytes=0)),
    _plant("any_shape", "supports_is_honest", "starts one rank of eight", supports=classmethod(lambda cls, query: ())),
)  # fmt: skip
