"""Logits processors in the runner and in front of it: rows, slots that are used again, faults, and the class by its path."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbet import SamplingParams
from rabbet.contracts.logits_processor import LogitsProcessor
from rabbet.errors import ConfigError, PluginLoadError, PluginPolicyError
from rabbet.runner.runner import DeviceRunner

_spec = importlib.util.spec_from_file_location("processors_runner_tests", Path(__file__).parent / "test_runner.py")
assert _spec is not None and _spec.loader is not None
base = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(base)
make = base.make
new, first_step, next_step, ready = base.new, base.first_step, base.next_step, base.ready


class Skip(LogitsProcessor):
    """The counting model says n + 1; for requests with ``skip`` this says n + 1 + skip."""

    @classmethod
    def validate(cls, sampling: SamplingParams) -> None:
        if (sampling.extra_args or {}).get("skip", 0) > 5:
            raise ValueError("skip is more than 5")

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.skips: dict[int, int] = {}
        self.seen: list[tuple[int, list[int]]] = []

    def add(self, slot: int, sampling: SamplingParams, prompt_token_ids: Any) -> None:
        assert slot not in self.skips
        self.skips[slot] = (sampling.extra_args or {}).get("skip", 0)
        if self.skips[slot] == 4:
            raise RuntimeError("not 4")

    def remove(self, slot: int) -> None:
        self.skips.pop(slot, None)

    def apply(self, batch: Any) -> torch.Tensor:
        for row, slot in enumerate(batch.slots):
            self.seen.append((slot, list(batch.output_token_ids[row])))
            if self.skips[slot] == 3:
                batch.logits_BV[row] = float("-inf")
            batch.logits_BV[row] = batch.logits_BV[row].roll(self.skips[slot])
        return batch.logits_BV


class Exact(Skip):
    """Objects to a request that it never took."""

    def add(self, slot: int, sampling: SamplingParams, prompt_token_ids: Any) -> None:
        if (sampling.extra_args or {}).get("skip", 0) == 4:
            raise RuntimeError("not 4")
        super().add(slot, sampling, prompt_token_ids)

    def remove(self, slot: int) -> None:
        del self.skips[slot]


class Sharpen(Skip):
    """Claims to change no likeliest token, so that greedy rows never see it."""

    is_argmax_invariant = True


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = types.ModuleType("own_processors")
    own.Skip, own.Sharpen, own.Exact, own.Other = Skip, Sharpen, Exact, int  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_processors", own)
    yield


def skip(count: int) -> dict[str, Any]:
    return {"temperature": 0.0, "extra_args": {"skip": count}}


def test_rows_are_changed_alone_and_slots_are_used_again_without_a_trace(make: Callable[..., DeviceRunner]) -> None:
    runner = ready(make(max_num_seqs=2, logits_processors=["own_processors:Skip"]))
    result = runner.execute(first_step(new("a", 4, **skip(2)), new("b", 9)))
    assert result.sampled_token_ids == {"a": [7], "b": [10]}
    assert runner.execute(next_step(2, {"a": 1, "b": 1})).sampled_token_ids == {"a": [10], "b": [11]}
    (_, made), *_ = runner._processors._made  # type: ignore[union-attr]
    assert sorted(ids for _, ids in made.seen[-2:]) == [[7], [10]]  # type: ignore[attr-defined]
    result = runner.execute(first_step(new("c", 20), step_id=3, gone=("a",)))
    assert result.sampled_token_ids == {"c": [21]}


def test_greedy_rows_are_left_out_where_the_likeliest_stays(make: Callable[..., DeviceRunner]) -> None:
    runner = ready(make(logits_processors=["own_processors:Sharpen"]))
    (_, made), *_ = runner._processors._made  # type: ignore[union-attr]
    made.seen.clear()  # type: ignore[attr-defined]
    result = runner.execute(
        first_step(new("a", 4, **skip(2)), new("r", 9, temperature=0.01, seed=1, extra_args={"skip": 1}))
    )
    assert result.sampled_token_ids == {"a": [5], "r": [11]} and len(made.seen) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("count", "words"), [(3, "left no token"), (4, "failed: RuntimeError")])
def test_a_processor_that_fails_for_a_request_fails_that_request_alone(
    make: Callable[..., DeviceRunner], count: int, words: str
) -> None:
    runner = ready(make(logits_processors=["own_processors:Skip"]))
    result = runner.execute(first_step(new("bad", 4, **skip(count)), new("b", 9)))
    assert words in result.failed["bad"] and "own_processors:Skip" in result.failed["bad"]
    assert result.sampled_token_ids == {"b": [10]}
    again = runner.execute(first_step(new("c", 20), step_id=2, gone=("bad",)))
    assert again.sampled_token_ids == {"c": [21]} and not again.failed


WRONG = {
    "SystemExit": lambda _logits: sys.exit(0),
    "RuntimeError": lambda _logits: (_ for _ in ()).throw(RuntimeError("no licence")),
    "TypeError: nothing": lambda _logits: None,
    "TypeError: list": lambda _logits: [[1.0]],
    "TypeError: columns": lambda logits: logits[:, :3],
    "TypeError: rows": lambda logits: logits[:0],
    "TypeError: one row": lambda logits: logits[0],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_processor_that_fails_in_a_step_fails_the_rows_that_it_saw(
    make: Callable[..., DeviceRunner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    runner = ready(make(logits_processors=["own_processors:Sharpen"]))
    monkeypatch.setattr(Sharpen, "apply", lambda _self, batch: WRONG[name](batch.logits_BV))
    sampled = {"temperature": 0.01, "seed": 1, "extra_args": {"skip": 1}}
    result = runner.execute(first_step(new("a", 4, **skip(2)), new("r", 9, **sampled)))
    assert result.failed == {"r": f"the logits processor own_processors:Sharpen failed: {name.partition(':')[0]}"}
    assert result.sampled_token_ids == {"a": [5]}
    assert "logits processor own_processors:Sharpen failed in apply()" in caplog.text
    monkeypatch.undo()
    again = runner.execute(first_step(new("c", 20), step_id=2, gone=("r",)))
    assert again.sampled_token_ids == {"c": [21]} and not again.failed


def test_a_processor_may_object_to_the_end_of_a_request_that_it_refused(make: Callable[..., DeviceRunner]) -> None:
    runner = ready(make(max_num_seqs=1, logits_processors=["own_processors:Exact"]))
    assert "failed: RuntimeError" in runner.execute(first_step(new("bad", 4, **skip(4)))).failed["bad"]
    for step, (name, gone) in enumerate((("c", "bad"), ("d", "c")), start=2):
        result = runner.execute(first_step(new(name, 20, **skip(2)), step_id=step, gone=(gone,)))
        assert result.sampled_token_ids == {name: [23]}


def test_names_are_obeyed_or_refused(make: Callable[..., DeviceRunner]) -> None:
    for names, error, words in (
        (["own_processors:Skip", "own_processors:Skip"], ConfigError, "twice"),
        (["own_processors:Missing"], PluginLoadError, "Missing"),
        (["own_processors:Other"], PluginLoadError, "does not derive from"),
    ):
        with pytest.raises(error, match=words):
            make(logits_processors=names)
    with pytest.raises(PluginPolicyError, match="logits-processors own_processors:Skip"):
        make(logits_processors=["own_processors:Skip"], plugins_allow=["faulty*"])
