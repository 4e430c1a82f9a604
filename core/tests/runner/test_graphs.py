"""Which steps are captured, that replays see the step's own inputs, and that what cannot be captured runs all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rabbet.config.schema import CompilationConfig
from rabbet.contracts.attention import GraphSupport
from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.platform import CaptureError, GraphSession, SupportsAsyncSteps, SupportsGraphs
from rabbet.runner.graphs import DecodeGraphs, capture_sizes, capture_token_sizes
from rabbet.runner.inputs import build_inputs
from rabbet.runner.slots import Slots
from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.sampling import SamplingParams

BLOCK, MAX_LEN = 4, 32


class Session(GraphSession):
    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.work()


class GraphPlatform(SupportsGraphs):
    """Replays by calling the work again."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.sessions: list[Session] = []

    def capture(self, work: Callable[[], None]) -> GraphSession:
        if self.fails:
            raise CaptureError("aten.item cannot be replayed")
        work()
        self.sessions.append(Session(work))
        return self.sessions[-1]


class Backend:
    def __init__(self, support: GraphSupport = GraphSupport.DECODE) -> None:
        self.support = support

    def graph_support(self) -> GraphSupport:
        return self.support


class Batch:
    """Two requests and what their decode steps should look like; the "model" writes what it was given into one tensor."""

    def __init__(self) -> None:
        self.slots = Slots(num_slots=4, max_model_len=MAX_LEN, num_groups=1, block_size=BLOCK)
        self.out = torch.zeros(4, 5, dtype=torch.int64)
        self.num_computed = {"a": 3, "b": 6}

    def compute(self, input_ids: torch.Tensor, positions: torch.Tensor, batches: list[AttentionBatch]) -> torch.Tensor:
        batch = batches[0]
        assert batch.max_query_len == 1 and batch.max_seq_len == MAX_LEN and batch.is_causal
        assert batch.query_start.tolist() == list(range(batch.num_requests + 1))
        count = batch.num_requests
        columns = (input_ids, positions, batch.seq_lens.long(), batch.slot_mapping, batch.block_table[:, 0].long())
        self.out[:count] = torch.stack(columns, dim=1)
        return self.out[:count]

    def start(self, **sampling: Any) -> StepPlan:
        return StepPlan(
            step_id=0,
            new_requests=[
                NewRequest(
                    request_id=name, token_ids=list(range(10, 10 + count + 1)), num_prompt_tokens=count + 1,
                    num_computed_tokens=count, block_ids=[[first, first + 1]], sampling=SamplingParams(**sampling), seed=0,
                )
                for name, count, first in (("a", 3, 1), ("b", 6, 5))
            ],
            num_scheduled_tokens={"a": 1, "b": 1},
        )  # fmt: skip

    def inputs(self, plan: StepPlan) -> Any:
        for new in plan.new_requests:
            self.slots.add(new)
        for running in plan.running_requests:
            self.slots.update(running)
        return build_inputs(plan, self.slots, block_size=BLOCK, device=torch.device("cpu"))

    def graphs(self, platform: GraphPlatform, sizes: frozenset[int] = frozenset((1, 2))) -> DecodeGraphs:
        return DecodeGraphs(platform, self.slots, self.compute, sizes, MAX_LEN)

    def next_plan(self, *names: str) -> StepPlan:
        """One more token for each."""
        for name in names:
            self.slots.append_tokens(self.slots.rows[name].slot, [20 + self.num_computed[name]])
            self.num_computed[name] += 1
        return StepPlan(
            step_id=1,
            running_requests=[
                RunningRequest(request_id=name, num_computed_tokens=self.num_computed[name], new_block_ids=[[]])
                for name in names
            ],
            num_scheduled_tokens=dict.fromkeys(names, 1),
        )


def test_a_replay_sees_the_inputs_of_its_step() -> None:
    batch, platform = Batch(), GraphPlatform()
    graphs = batch.graphs(platform)
    first = graphs.run(batch.inputs(batch.start()))
    assert first is not None and first.tolist() == [[13, 3, 4, 7, 1], [16, 6, 7, 5 * BLOCK + BLOCK + 2, 5]]
    second = graphs.run(batch.inputs(batch.next_plan("a", "b")))
    assert second is not None and second.tolist() == [[23, 4, 5, 8, 1], [26, 7, 8, 5 * BLOCK + BLOCK + 3, 5]]
    alone = graphs.run(batch.inputs(batch.next_plan("a")))
    assert alone is not None and alone.tolist() == [[24, 5, 6, 9, 1]]
    assert [session.num_replays for session in platform.sessions] == [1, 0]


def test_chunks_prompt_logprobs_and_other_sizes_are_not_captured() -> None:
    platform = GraphPlatform()
    batch = Batch()
    chunk = batch.start()
    chunk.new_requests[0] = replace(chunk.new_requests[0], num_computed_tokens=2)
    chunk.num_scheduled_tokens["a"] = 2
    assert batch.graphs(platform).run(batch.inputs(chunk)) is None
    batch = Batch()
    unfinished = batch.start()
    unfinished.new_requests[1].token_ids.append(99)
    assert batch.graphs(platform).run(batch.inputs(unfinished)) is None
    batch = Batch()
    assert batch.graphs(platform).run(batch.inputs(batch.start(prompt_logprobs=1))) is None
    batch = Batch()
    assert batch.graphs(platform, frozenset((1, 3))).run(batch.inputs(batch.start())) is None
    assert platform.sessions == []


def test_what_cannot_be_captured_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    batch, platform = Batch(), GraphPlatform(fails=True)
    graphs = batch.graphs(platform)
    caplog.set_level("INFO", "rabbet.runner.graphs")
    assert graphs.run(batch.inputs(batch.start())) is None
    platform.fails = False
    assert graphs.run(batch.inputs(batch.next_plan("a", "b"))) is None
    assert caplog.text.count("aten.item cannot be replayed") == 1


def sizes(**changes: Any) -> frozenset[int]:
    values: dict[str, Any] = {
        "enforce_eager": False, "compilation": CompilationConfig(), "level": 2, "world_size": 1,
        "support": GraphSupport.DECODE, "platform": GraphPlatform(),
    } | changes  # fmt: skip
    resolved = SimpleNamespace(
        config=SimpleNamespace(
            model=SimpleNamespace(enforce_eager=values["enforce_eager"]),
            compilation=values["compilation"],
            optimization_level=values["level"],
        ),
        world_size=values["world_size"],
        max_num_seqs=4,
        max_model_len=MAX_LEN,
    )
    backends: Any = [Backend(), Backend(values["support"])]
    return capture_sizes(resolved, values["platform"], backends)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True},
        {"compilation": CompilationConfig(cudagraph_mode="NONE")},
        {"level": 0},
        {"world_size": 2},
        {"support": GraphSupport.NEVER},
        {"platform": object()},
        {"compilation": CompilationConfig(cudagraph_capture_sizes=[9])},
    ],
)
def test_there_are_no_graphs_where_one_part_does_not_want_them(changes: dict[str, Any]) -> None:
    assert not sizes(**changes)


def test_sizes_are_those_that_were_asked_for_up_to_the_largest_batch() -> None:
    for compilation, expected in (
        (CompilationConfig(), {1, 2, 3, 4}),
        (CompilationConfig(max_cudagraph_capture_size=2), {1, 2}),
        (CompilationConfig(cudagraph_capture_sizes=[1, 4, 8]), {1, 4}),
    ):
        assert sizes(compilation=compilation) == expected


class AheadPlatform(GraphPlatform, SupportsAsyncSteps):
    def mark(self) -> Callable[[], None]:
        return lambda: None

    def draw(self, logits_BV: torch.Tensor, batch: Any) -> torch.Tensor:
        return logits_BV.argmax(-1)


def test_where_steps_run_ahead_few_sizes_stand_for_all() -> None:
    assert sizes(platform=AheadPlatform()) == {1, 2, 4}
    assert sizes(platform=AheadPlatform(), compilation=CompilationConfig(max_cudagraph_capture_size=3)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("mode", "supports", "weights_bytes", "expected"),
    [
        (None, [GraphSupport.RAGGED, GraphSupport.RAGGED], 1 << 30, (64, 128)),
        (None, [GraphSupport.RAGGED], 16 << 30, (64, 128)),
        # Such a step computes for longer than the host needs to launch it.
        (None, [GraphSupport.RAGGED], 40 << 30, (64,)),
        ("FULL_DECODE_ONLY", [GraphSupport.RAGGED], 1 << 30, ()),
        (None, [GraphSupport.RAGGED, GraphSupport.ALWAYS], 1 << 30, ()),
    ],
)
def test_mixed_batches_are_captured_where_every_backend_takes_any(
    mode: Any, supports: list[GraphSupport], weights_bytes: int, expected: tuple[int, ...]
) -> None:
    config = SimpleNamespace(compilation=CompilationConfig(cudagraph_mode=mode))
    resolved: Any = SimpleNamespace(config=config, max_num_batched_tokens=200)
    backends: Any = [Backend(support) for support in supports]  # type: ignore[misc]
    assert capture_token_sizes(resolved, backends, weights_bytes) == expected
