"""The executor of one rank on a device that runs ahead of the host: steps in order, and failures that the future tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rabbet_sdk.conformance._executor_rig import FAIL, Bench, told
from rabbet_sdk.mutants.platform import DrawingPlatform

from rabbet.contracts import register_platform
from rabbet.errors import EngineDeadError
from rabbet.worker.uni import UniExecutor


@register_platform("runs_ahead_of_the_host")
class AheadPlatform(DrawingPlatform):
    """Nothing is ever under way, but nobody may look before he has waited."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    script = (((5, 6, 7), (8, 9, 10)), ((20,), (21, 22)))
    made = Bench(UniExecutor, "uni", tmp_path / "model", script=script, device="runs_ahead_of_the_host").ready()
    yield made
    made.close()


def test_steps_that_are_launched_ahead_give_what_the_model_says(bench: Bench) -> None:
    futures = [bench.start("a", 5, 6, 7), bench.go_on("a")]
    assert [told(future)["a"] for future in futures] == [[8], [9]]
    assert told(bench.start("b", 20)) == {"b": [21]}
    bench.executor.check_health()


def test_a_step_that_cannot_be_launched_fails_its_future_and_is_the_end(bench: Bench) -> None:
    future = bench.start("a", 5, FAIL)
    with pytest.raises(RuntimeError, match="told to fail in a step"):
        future.result(timeout=60)
    with pytest.raises(EngineDeadError, match="told to fail in a step"):
        bench.executor.check_health()
