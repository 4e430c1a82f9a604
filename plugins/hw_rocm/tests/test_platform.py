"""What the platform asks of torch on a device, and draws, which are plain torch and run anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rabbet_hw_rocm import devices
from rabbet_hw_rocm.platform import RocmPlatform
from rabbet_hw_rocm.sampling import draw
from rabbet_sdk.mutants.platform import RecordingPlatform
from rabbet_sdk.oracles.sampling import assert_drawn_from, filtered
from rocm_topology import Node, write_topology

from rabbet.contracts.platform import CaptureError, DrawBatch


class Cuda:
    """The part of ``torch.cuda`` that the platform uses, with numbers that the test sets."""

    def __init__(self, archs: list[str]) -> None:
        self.archs, self.current, self.calls = archs, None, []
        self.free, self.total, self.allocated, self.reserved, self.peak = 900, 1000, 50, 80, 50
        self.fails = ""

    def device_count(self) -> int:
        return len(self.archs)

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(gcnArchName=f"{self.archs[index]}:sramecc+:xnack-")

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.free += self.reserved - self.allocated
        self.reserved = self.allocated

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, self.total

    def memory_allocated(self) -> int:
        return self.allocated

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def graph_pool_handle(self) -> object:
        self.calls.append("pool")
        return self

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.calls.append("replay"))

    @contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        assert options == {"pool": self, "capture_error_mode": "thread_local"}
        self.calls.append("begin")
        yield
        self.calls.append("end")
        if self.fails:
            raise RuntimeError(self.fails)


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Two GPUs for computing behind the small one of a processor."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    topology, render = write_topology(
        tmp_path, Node(version=100306), Node(unique_id=0xA1), Node(unique_id=0xB2), Node(unique_id=0xC3)
    )
    monkeypatch.setattr(devices, "TOPOLOGY", topology)
    monkeypatch.setattr(devices, "RENDER", render)
    made = Cuda(["gfx1036", "gfx942", "gfx942", "gfx942"])
    monkeypatch.setattr(torch, "cuda", made)
    return made


@pytest.mark.parametrize(
    ("ids", "rank", "index"),
    [((), 0, 1), ((), 2, 3), (("3", "1"), 0, 3), (("3", "1"), 1, 1), (("GPU-00000000000000b2",), 0, 2)],
)
def test_ranks_take_the_gpus_that_kernels_run_on(ids: tuple[str, ...], rank: int, index: int, cuda: Cuda) -> None:
    platform = RocmPlatform()
    platform.device_ids = ids
    device = platform.init_device(local_rank=rank, world_size=2)
    assert device == cuda.current == torch.device("cuda", index)


def test_numbers_that_hip_has_otherwise_are_refused(cuda: Cuda) -> None:
    cuda.archs.pop(0)
    with pytest.raises(
        RuntimeError, match=r"HIP has the GPUs gfx942, gfx942, gfx942, but the driver lists gfx1036, gfx942"
    ):
        RocmPlatform().init_device(local_rank=0, world_size=1)
    assert cuda.current is None


def test_memory_counts_what_the_allocator_keeps_as_free(cuda: Cuda) -> None:
    platform = RocmPlatform()
    found = platform.memory()
    assert (found.total_bytes, found.free_bytes, found.used_by_process_bytes) == (1000, 930, 50)
    cuda.peak = 350
    assert platform.peak_activation_bytes() == 300
    cuda.allocated = 60
    platform.memory()
    assert platform.peak_activation_bytes() == 0


def test_a_capture_runs_first_and_replays_once(cuda: Cuda) -> None:
    platform = RocmPlatform()
    session = platform.capture(lambda: cuda.calls.append("work"))
    once = ["work", "synchronize", "begin", "work", "end", "replay"]
    assert cuda.calls == ["pool", *once]
    session.replay()
    platform.capture(lambda: cuda.calls.append("work"))
    assert cuda.calls == ["pool", *once, "replay", *once], "graphs share a pool"


def test_what_hip_cannot_capture_is_told_in_one_line(cuda: Cuda) -> None:
    cuda.fails = "HIP error: operation not permitted when stream is capturing\nCompile with TORCH_USE_HIP_DSA"
    with pytest.raises(CaptureError, match="^HIP error: operation not permitted when stream is capturing$"):
        RocmPlatform().capture(lambda: None)


def test_work_that_fails_on_its_own_is_no_matter_of_graphs(cuda: Cuda) -> None:
    def work() -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        RocmPlatform().capture(work)


def batch(count: int, **values: Any) -> DrawBatch:
    """``count`` rows, each number one for all or a list."""

    def column(name: str, default: Any, dtype: torch.dtype) -> torch.Tensor:
        given = values.get(name, default)
        return torch.tensor(given if isinstance(given, list) else [given] * count, dtype=dtype)

    temperature, top_k = column("temperature", 1.0, torch.float32), column("top_k", 0, torch.int32)
    top_p, min_p = column("top_p", 1.0, torch.float32), column("min_p", 0.0, torch.float32)
    return DrawBatch(
        temperature_B=temperature, top_k_B=top_k, top_p_B=top_p, min_p_B=min_p, seed_B=column("seed", 0, torch.int64),
        index_B=column("index", 0, torch.int64), is_random=bool((temperature > 0).any()),
        is_filtered=bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
    ],
)  # fmt: skip
@pytest.mark.parametrize("varies", ["seed", "index"])
def test_tokens_are_as_frequent_as_they_are_likely(options: dict[str, Any], varies: str) -> None:
    count, logits = 4000, torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, float("-inf")])
    tokens = draw(logits.expand(count, -1), batch(count, **options, **{varies: list(range(count))}))
    seen = torch.bincount(tokens, minlength=8).double()
    assert_drawn_from(seen, filtered(logits.double(), **options) * count, f"{options}")


def test_company_place_and_number_of_rows_change_no_draw() -> None:
    logits = torch.randn(70, 900, generator=torch.Generator().manual_seed(1))
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.01, "temperature": 1.4},
    ]
    rows = [
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": n // 3 - 9, "index": n} | kinds[n % 5]
        for n in range(70)
    ]
    together = draw(logits, batch(70, **{key: [row[key] for row in rows] for key in rows[0]})).tolist()
    for n, row in enumerate(rows):
        assert draw(logits[n : n + 1], batch(1, **row)).tolist() == [together[n]]
    assert together[1::5] == logits[1::5].argmax(-1).tolist()
    assert len(set(together)) > 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}])
def test_rows_that_are_not_finite_say_so_alone(dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits = torch.randn(6, 450, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[1, 440], logits[2, 7], logits[3], logits[4, :449] = float("nan"), float("inf"), float("-inf"), float("-inf")
    before = logits.clone()
    tokens = draw(logits, batch(6, **options)).tolist()
    assert tokens[1:5] == [-1, -1, -1, 449] and min(tokens[0], tokens[5]) >= 0
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "logits were changed"


def test_equal_logits_give_the_first_id_and_no_rows_give_none() -> None:
    logits = torch.zeros(3, 900)
    logits[1, 800:] = 1.0
    assert draw(logits, batch(3, temperature=[0.0, 0.0, 1.0], top_k=[0, 0, 2])).tolist()[:2] == [0, 800]
    assert draw(logits, batch(3, temperature=0.0)).tolist() == [0, 800, 0]
    assert draw(logits[:0], batch(0)).tolist() == []


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}])
def test_draws_look_at_no_value(options: dict[str, Any]) -> None:
    """So that a step with its draw can be captured: what stands in for a graph refuses an operation that does."""
    logits, rows = torch.randn(3, 90, generator=torch.Generator().manual_seed(3)), batch(3, **options)
    with RecordingPlatform.session() as session:
        tokens = draw(logits, rows)
    before = tokens.clone()
    logits.copy_(logits.flip(1))
    session.replay()
    assert torch.equal(tokens, draw(logits, rows)) and not torch.equal(tokens, before)
