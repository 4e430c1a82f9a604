"""Steps that are launched ahead: replays of decodes and of mixed batches draw what steps run one by one draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.platform import CaptureError, DrawBatch, GraphSession, SupportsAsyncSteps, SupportsGraphs
from rabbet.runner.launch import Launcher
from rabbet.runner.slots import Slots
from rabbet.types.outputs import StepResult
from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.sampling import SamplingParams

BLOCK, MAX_LEN, NUM_SLOTS, VOCABULARY = 4, 64, 6, 97


class Session(GraphSession):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class Platform(SupportsGraphs, SupportsAsyncSteps):
    """Replays by doing the work again, into the tensors that the capture left: later ones are copied there."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.drawn: list[DrawBatch] = []

    def capture(self, work: Callable[[], None]) -> GraphSession:
        if self.fails:
            raise CaptureError("no")
        cells: Sequence[Any] = [cell.cell_contents for cell in work.__closure__ or ()]
        (made,) = (cell for cell in cells if isinstance(cell, list) and not cell)
        work()
        kept = made[0]

        def again() -> None:
            work()
            for old, new in zip(kept, made[-1], strict=True):
                old.copy_(new)

        return Session(again)

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def draw(self, logits_BV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
        self.drawn.append(batch)
        moved = logits_BV + torch.where(batch.temperature_B > 0, (batch.seed_B + 3 * batch.index_B) % 7, 0).unsqueeze(1)
        if batch.is_filtered:
            moved = moved + batch.top_k_B.unsqueeze(1)
        is_bad = ~moved.isfinite().all(1)
        return (moved.nan_to_num().sum(1).long() % VOCABULARY).masked_fill(is_bad, -1)


class Model:
    """A cache of sums: a token's hidden state is the weighted sum of its request's tokens so far, in every cache group."""

    def __init__(self, num_groups: int, *, is_poisoned: bool = True) -> None:
        self.caches = [torch.zeros(256, dtype=torch.float64) for _ in range(num_groups)]
        self.calls: list[AttentionBatch] = []
        self.is_poisoned = is_poisoned

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, batches: list[AttentionBatch]) -> torch.Tensor:
        self.calls.append(batches[0])
        assert len(ids) == len(positions) == batches[0].num_tokens
        hidden = torch.full((len(ids), len(batches)), float("nan"), dtype=torch.float64)
        for group, (cache, batch) in enumerate(zip(self.caches, batches, strict=True)):
            for token, slot in enumerate(batch.slot_mapping.tolist()):
                if slot >= 0:
                    cache[slot] = int(ids[token]) * (1 + int(positions[token])) + group
            starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
            assert starts[-1] <= batch.num_tokens and len(starts) == batch.num_requests + 1
            for request, length in enumerate(lengths):
                count = starts[request + 1] - starts[request]
                for offset in range(count):
                    seen = torch.arange(length - count + offset + 1)
                    places = batch.block_table[request, seen // BLOCK].long() * BLOCK + seen % BLOCK
                    hidden[starts[request] + offset, group] = cache[places].sum()
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # Rows that belong to nobody hold anything at all.
        return hidden * torch.arange(1, 4, dtype=torch.float64).repeat(hidden.shape[1])[: hidden.shape[1]]


class Engine:
    """Requests with their blocks; plans are made as a scheduler would, one step ahead of the results."""

    def __init__(
        self, *, sizes: Sequence[int], token_sizes: Sequence[int], num_groups: int = 2, fails: bool = False, is_warm: bool = True
    ) -> None:
        self.slots = Slots(num_slots=NUM_SLOTS, max_model_len=MAX_LEN, num_groups=num_groups, block_size=BLOCK)
        self.model, self.platform = Model(num_groups), Platform(fails=fails)
        self.launcher = Launcher(
            self.platform, self.slots, device=torch.device("cpu"), block_size=BLOCK, max_model_len=MAX_LEN,
            forward=self.model.forward, compute_logits=self.model.compute_logits, sizes=sizes, token_sizes=token_sizes,
        )  # fmt: skip
        self.computed: dict[str, int] = {}
        self.next_block = 1
        self.groups = num_groups
        self.step_id = 0
        if is_warm:
            self.launcher.capture_all()
        self.model.calls.clear()

    def step(
        self, counts: dict[str, int], new: dict[str, tuple[int, dict[str, Any]]] | None = None
    ) -> Callable[[], StepResult]:
        """``counts`` tokens of each; ``new`` requests have a prompt length and sampling parameters."""
        requests = []
        for name, (length, sampling) in (new or {}).items():
            blocks = [[self.next_block + 4 * group + i for i in range(4)] for group in range(self.groups)]
            self.next_block += 4 * self.groups if self.groups * 4 + self.next_block < 60 else 0
            requests.append(NewRequest(
                request_id=name, token_ids=[(7 * i + len(name) + ord(name[0])) % VOCABULARY for i in range(length)],
                num_prompt_tokens=length, num_computed_tokens=0, block_ids=blocks, sampling=SamplingParams(**sampling), seed=5,
            ))  # fmt: skip
            self.computed[name] = 0
        for request in requests:
            self.slots.add(request)
        running = [
            RunningRequest(request_id=name, num_computed_tokens=self.computed[name], new_block_ids=[[]] * self.groups)
            for name in counts
            if name not in (new or {})
        ]
        for one in running:
            self.slots.update(one)
        self.step_id += 1
        plan = StepPlan(
            step_id=self.step_id, new_requests=requests, running_requests=running, num_scheduled_tokens=counts
        )
        for name, count in counts.items():
            self.computed[name] += count
        return self.launcher.launch(plan)


GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 1.0}
FILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 3}


def story(engine: Engine) -> list[dict[str, list[int]]]:
    """Chunks, decodes and both, results read one step late."""
    steps: list[tuple[dict[str, int], dict[str, tuple[int, dict[str, Any]]]]] = [
        ({"a": 5}, {"a": (5, GREEDY)}),
        ({"a": 1, "b": 3, "c": 1}, {"b": (6, RANDOM), "c": (3, FILTERED)}),
        ({"a": 1, "b": 3, "c": 2}, {}),
        ({"a": 1, "b": 1, "c": 1}, {}),
        ({"c": 1, "a": 1, "d": 7}, {"d": (8, GREEDY)}),
        ({"d": 1}, {}),
        ({"d": 1, "b": 1, "a": 1, "c": 1}, {}),
    ]
    found, before = [], None
    for counts, new in steps:
        wait = engine.step(counts, new)
        if before is not None:
            found.append(before().sampled_token_ids)
        before = wait
    assert before is not None
    return [*found, before().sampled_token_ids]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("sizes", "token_sizes"), [((1, 2, 4), (8, 16)), ((4,), (16,)), ((3,), (6, 11)), ((4,), ())])
def test_replays_draw_what_single_operations_draw(
    num_groups: int, sizes: tuple[int, ...], token_sizes: tuple[int, ...]
) -> None:
    expected = story(Engine(sizes=(), token_sizes=(), num_groups=num_groups))
    assert [sorted(step) for step in expected[:3]] == [["a"], ["a"], ["a", "b", "c"]]
    engine = Engine(sizes=sizes, token_sizes=token_sizes, num_groups=num_groups)
    assert story(engine) == expected


def test_a_mixed_step_is_one_replay_of_the_next_larger_size_up_to_its_number_of_requests() -> None:
    engine = Engine(sizes=(2,), token_sizes=(8, 16))
    assert engine.launcher.max_mixed == 2
    for counts, new, is_ragged, num_tokens in (
        ({"a": 5}, {"a": (5, GREEDY)}, True, 8),
        ({"a": 1, "b": 9}, {"b": (9, GREEDY)}, True, 16),
        ({"a": 1, "b": 1}, {}, False, 2),
        ({"a": 1, "b": 1, "c": 4}, {"c": (4, GREEDY)}, False, 6),
        ({"d": 15}, {"d": (15, GREEDY)}, True, 16),
    ):
        engine.step(counts, new)()
        batch = engine.model.calls[-1]
        assert (batch.is_ragged, batch.num_tokens) == (is_ragged, num_tokens)
        if is_ragged:
            assert batch.num_requests == 2 and batch.max_query_len == num_tokens and batch.max_seq_len == MAX_LEN
            total = sum(counts.values())
            assert batch.query_start.tolist()[len(counts) :] == [total] * (3 - len(counts))
            assert set(batch.slot_mapping.tolist()[total:]) <= {-1}
            assert all(slot >= 0 for slot in batch.slot_mapping.tolist()[:total])


def test_a_request_that_does_not_sample_leaves_no_token_behind() -> None:
    """Its row of logits is drawn too, into the row that belongs to nobody."""
    engine = Engine(sizes=(4,), token_sizes=(16,))
    engine.step({"a": 3}, {"a": (3, GREEDY)})()
    slot = engine.slots.rows["a"].slot
    last = int(engine.launcher._last[slot])
    assert engine.step({"b": 2}, {"b": (9, GREEDY)})().sampled_token_ids == {}
    assert int(engine.launcher._last[slot]) == last and int(engine.launcher._last[engine.slots.rows["b"].slot]) == 0
    assert engine.slots.num_tokens[engine.slots.rows["b"].slot] == 9


def test_bad_logits_of_a_mixed_step_fail_their_request_alone() -> None:
    engine = Engine(sizes=(4,), token_sizes=(16,))
    engine.step({"a": 3}, {"a": (3, GREEDY)})()
    first = int(engine.slots.block_tables[0][engine.slots.rows["a"].slot, 0])
    engine.model.caches[0][first * BLOCK] = float("nan")
    result = engine.step({"b": 2, "a": 1, "c": 3}, {"b": (9, GREEDY), "c": (3, GREEDY)})()
    assert list(result.failed) == ["a"] and list(result.sampled_token_ids) == ["c"]


def test_what_cannot_be_captured_runs_operation_by_operation() -> None:
    expected = story(Engine(sizes=(), token_sizes=()))
    engine = Engine(sizes=(4,), token_sizes=(16,), fails=True)
    assert engine.launcher.sizes == engine.launcher.token_sizes == ()
    assert story(engine) == expected


def test_nothing_is_captured_before_its_turn() -> None:
    engine = Engine(sizes=(4,), token_sizes=(16,), fails=True, is_warm=False)
    assert engine.step({"a": 2}, {"a": (2, GREEDY)})().sampled_token_ids.keys() == {"a"}
    engine.step({"a": 1})()
    assert not any(batch.is_ragged for batch in engine.model.calls)
