"""The suite of executors: steps in order, one answer each, and no way in which a rank ends leaves anyone waiting.

Claims of a manifest that it reads:

* ``world_size``: numbers of ranks that it runs; left out, any.
* ``features``: of ``several_nodes`` and ``processes`` (ranks have processes of their own, so that the end of one is survived).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from rabbet.contracts.executor import ExecutorQuery
from rabbet.errors import EngineDeadError, RabbetError
from rabbet_sdk.conformance._executor_rig import DEVICE, EXIT, FAIL, WAIT, WAIT_S, Bench, told
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, unclaimed
from rabbet_sdk.conformance.subject import Subject

__all__ = ["ExecutorConformance"]

_SIZES = (1, 2, 3, 8)
_OVERTAKING_S = 0.5


class ExecutorConformance(SupportsConformance):
    """Subclass, name the plugin, done. See the module for claims."""

    kind = "executor"

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Numbers of ranks, of machines, with and without asynchronous steps."""
        size = next((size for size in _SIZES if claims.allows("world_size", size)), 1)
        found: list[tuple[str, ExecutorQuery, tuple[str, ...]]]
        found = [(f"ranks_{n}", ExecutorQuery(world_size=n), ()) for n in _SIZES]
        found.append(("synchronous", ExecutorQuery(world_size=size, is_async=False), ()))
        found.append(("nodes_2", ExecutorQuery(world_size=size * 2, num_nodes=2), ("several_nodes",)))
        return [
            Case(
                id=id, value=query,
                unclaimed=claims.missing({"world_size": query.world_size // query.num_nodes}, features),
            )
            for id, query, features in found
        ]  # fmt: skip

    @classmethod
    def size_cases(cls, claims: Claims) -> list[Case]:
        """Numbers of ranks that the scripted model can be divided by."""
        return [Case(id=f"ranks_{n}", value=n, unclaimed=claims.missing({"world_size": n})) for n in (1, 2)]

    @pytest.fixture
    def make(self, subject: Subject, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
        """Makes executors, and shuts them down; one rank, or two where one is not claimed."""
        made: list[Bench] = []
        least = 1 if subject.claims.allows("world_size", 1) else 2

        def make(**options: Any) -> Bench:
            options.setdefault("world_size", least)
            made.append(Bench(subject.plugin_class, subject.entry.name, tmp_path / f"model-{len(made)}", **options))
            return made[-1]

        yield make
        for bench in made:
            bench.close()

    @level(3)
    @dangerous
    @cases("size_cases")
    def test_steps_give_what_the_model_says(self, make: Callable[..., Bench], case: Case) -> None:
        """Specs, a sound report, then the script, token by token; two requests by turns keep apart."""
        script = (((5, 6, 7), (8, 9, 10)), ((20,), (21, 22)))
        bench = make(world_size=case.value, script=script).ready()
        assert bench.specs and all(isinstance(name, str) for name in bench.specs), f"cache specs {bench.specs}"
        report = bench.report
        assert report is not None and 0 < report.available_kv_bytes <= report.total_bytes, report
        assert 0 <= report.weights_bytes <= report.total_bytes and report.activation_bytes >= 0, report
        assert bench.executor.max_concurrent_steps >= 1
        assert all(len(pair) == 2 for pair in bench.executor.evidence())
        bench.executor.check_health()
        said: dict[str, list[int]] = {}
        for name, (prompt, _) in zip("ab", script, strict=True):
            result = bench.start(name, *prompt).result(timeout=WAIT_S)
            assert result.step_id == bench.steps, f"the result of step {result.step_id} for step {bench.steps}"
            said[name] = list(result.sampled_token_ids[name])
        for name in ("b", "a", "a"):
            said[name] += told(bench.go_on(name))[name]
        assert said == {"a": [8, 9, 10], "b": [21, 22]}

    @level(3)
    @dangerous
    def test_execute_returns_at_once_and_steps_keep_their_order(self, make: Callable[..., Bench]) -> None:
        """A step that waits for something does not hold the caller, and a later one does not overtake it."""
        bench = make(script=(((5, WAIT), (8, 9)),)).ready()
        order: list[str] = []
        first = bench.start("a", 5, WAIT)
        is_under_way = not first.done()
        first.add_done_callback(lambda _: order.append("first"))
        futures = [first]
        if bench.executor.max_concurrent_steps > 1:
            # It samples from what the first one leaves in the row.
            futures.append(bench.go_on("a"))
            futures[1].add_done_callback(lambda _: order.append("second"))
            # Time to overtake, for one that does; the first ends only with its release.
            wait(futures[1:], timeout=_OVERTAKING_S)
        bench.release()
        assert [told(future)["a"] for future in futures] == [[8], [9]][: len(futures)], "the steps did not run in order"
        assert is_under_way, "execute waits for the step; the scheduler could not plan the next one meanwhile"
        assert order == ["first", "second"][: len(futures)], f"results came in the order {order}"

    @level(3)
    @dangerous
    def test_a_failure_is_told(self, make: Callable[..., Bench]) -> None:
        """The future of a step that fails raises what happened; then ``check_health`` raises, or later steps are right."""
        bench = make(script=(((5, 6), (7, 8)),)).ready()
        with pytest.raises(Exception, match="told to fail in a step"):
            bench.start("a", 5, FAIL).result(timeout=WAIT_S)
        try:
            bench.executor.check_health()
        except EngineDeadError:
            return
        assert [told(bench.start("b", 5, 6)), told(bench.go_on("b"))] == [{"b": [7]}, {"b": [8]}]

    @level(3)
    @dangerous
    def test_a_model_that_cannot_load_is_told(self, make: Callable[..., Bench]) -> None:
        """``load`` raises the cause, and ends."""
        bench = make(is_broken=True)
        with pytest.raises(Exception, match="told to fail at the start"):
            bench.executor.load()

    @level(3)
    @dangerous
    def test_the_end_of_a_rank_is_noticed(self, make: Callable[..., Bench], subject: Subject) -> None:
        """A process that ends fails its step and all that wait, and ``check_health`` says so."""
        if not subject.claims.has("processes"):
            unclaimed("feature processes")
        bench = make().ready()
        future = bench.start("a", 5, EXIT)
        with pytest.raises(RabbetError):
            future.result(timeout=WAIT_S)
        with pytest.raises(EngineDeadError):
            bench.executor.check_health()

    @level(3)
    @dangerous
    def test_shutdown_ends_everything(self, make: Callable[..., Bench]) -> None:
        """Before loading, while idle and while a step runs: no thread, no process, nobody who waits; and again."""
        before, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
        made = [make(), make(script=(((5, WAIT), (8,)),)).ready()]
        # Not released: it is under way when the end comes.
        waiting = made[1].start("a", 5, WAIT)
        for bench in reversed(made):
            bench.executor.shutdown()
            bench.executor.shutdown()
        assert waiting.done(), "a step that ran at the end has no result and no error: its request would wait for ever"
        left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
        assert not left, f"threads stay: {', '.join(left)}"
        alive = set(psutil.Process().children(recursive=True)) - children
        assert not alive, f"processes stay: {alive}"

    @level(3)
    @dangerous
    def test_two_executors_share_no_state(self, make: Callable[..., Bench]) -> None:
        """Two engines in one process, by turns; the end of one does not touch the other."""
        one, two = make(script=(((5, 6), (7, 8)),)).ready(), make(script=(((5, 6), (17, 18)),)).ready()
        assert [told(bench.start("a", 5, 6)) for bench in (one, two)] == [{"a": [7]}, {"a": [17]}]
        assert told(one.go_on("a")) == {"a": [8]}
        one.executor.shutdown()
        two.executor.check_health()
        assert told(two.go_on("a")) == {"a": [18]}

    @level(4)
    @dangerous
    def test_an_engine_runs_on_it(self, subject: Subject, tmp_path: Path) -> None:
        """Scheduler, sampler and this executor: the script, for several requests at once."""
        from rabbet_sdk.fakes.engine import TinyEngine

        script = [((5, 6, 7), (8, 9, 10)), ((20,), (21, 22)), (tuple(range(2, 40)), (41, 42, 43))]
        size = 1 if subject.claims.allows("world_size", 1) else 2
        options = {"distributed_executor_backend": subject.entry.name, "tensor_parallel_size": size, "device": DEVICE}
        with TinyEngine(tmp_path / "model", script=script, **options) as engine:
            said = engine.generate([prompt for prompt, _ in script])
        assert [tokens[:-1] for tokens in said] == [list(output) for _, output in script], said
