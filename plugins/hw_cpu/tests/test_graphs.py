"""Recorded steps give the same bits as steps that are not recorded, on new inputs and whatever else uses the memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from rabbet_hw_cpu import native
from rabbet_hw_cpu.graphs import Arena, capture
from rabbet_hw_cpu.linear import CpuLinear
from rabbet_hw_cpu.ops import NativeLayerOps

from rabbet.contracts.platform import CaptureError

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler was there when the package was installed")
LINEAR = CpuLinear()
SIZE = 64


class Work:
    """Two layers of compiled calls with operations of torch before, between and after them."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.ops = NativeLayerOps()
        self.table = torch.randn(50, SIZE, generator=generator).to(dtype)
        self.norm = torch.rand(SIZE, generator=generator).to(dtype)
        self.up = LINEAR.pack(torch.randn(4 * SIZE, SIZE, generator=generator).to(dtype) / 8)
        self.down = LINEAR.pack(torch.randn(SIZE, 2 * SIZE, generator=generator).to(dtype) / 8)
        self.ids = torch.zeros(rows, dtype=torch.int64)
        self.outputs: list[torch.Tensor] = []

    def __call__(self) -> None:
        x = torch.nn.functional.embedding(self.ids, self.table)
        residual, x = x, self.ops.rms_norm(x, self.norm, 1e-5)
        for _ in range(2):
            gated = LINEAR.apply_gated_silu(x, self.up)
            assert gated is not None
            x = LINEAR.apply(gated, self.down)
            x = x * 0.5  # torch's own
            x.add_(1)  # in place
            x, residual = self.ops.add_rms_norm(x, residual, self.norm, 1e-5)
        self.outputs.append(x)

    def expected(self) -> torch.Tensor:
        self()
        return self.outputs.pop().clone()


def test_recording_imports_no_compiler() -> None:
    """It would take more than a second of somebody's first request."""
    code = (
        "import sys, torch\nfrom rabbet_hw_cpu.graphs import Arena, capture\n"
        "x = torch.ones(2)\ncapture(lambda: x.add_(1), Arena()).replay()\n"
        "print(x.tolist(), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[3.0, 3.0] False"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_replay_gives_the_bits_of_a_plain_run_on_new_inputs(dtype: torch.dtype) -> None:
    work = Work(3, dtype)
    work.ids.copy_(torch.tensor([1, 2, 3]))
    wanted = work.expected()
    session = capture(work, Arena())
    out = work.outputs.pop()
    assert torch.equal(out, wanted)
    for ids in ([7, 8, 9], [49, 0, 7], [1, 2, 3]):
        work.ids.copy_(torch.tensor(ids))
        wanted = work.expected()
        out.fill_(float("nan"))
        session.replay()
        assert torch.equal(out, wanted)


@torch.inference_mode()
def test_memory_of_a_session_is_given_to_nobody_else() -> None:
    work = Work(4, torch.float32)
    session = capture(work, Arena())
    out = work.outputs.pop()
    wanted = work.expected()
    others = [torch.full((rows, width), float("nan")) for rows in range(1, 9) for width in (SIZE, 2 * SIZE, 4 * SIZE)]
    session.replay()
    assert torch.equal(out, wanted)
    assert all(other.isnan().all() for other in others)


@torch.inference_mode()
def test_sessions_of_one_arena_take_turns() -> None:
    arena = Arena()
    works = [Work(rows, torch.float32) for rows in (1, 2, 5)]
    sessions = [capture(work, arena) for work in works]
    outs = [work.outputs.pop() for work in works]
    assert len(arena.chunks) == 1
    for index in (2, 0, 1, 0, 2):
        works[index].ids.fill_(index + 11)
        wanted = works[index].expected()
        sessions[index].replay()
        assert torch.equal(outs[index], wanted)


def test_an_arena_grows_and_starts_again_at_the_same_place() -> None:
    arena = Arena()
    first = [arena.take(size) for size in (100, 3 << 20, 3 << 20, 9 << 20)]
    starts = [part.data_ptr() for part in first]
    ends = [part.data_ptr() + part.numel() for part in first]
    assert all(
        end <= start or start == starts[i] for i, end in enumerate(ends) for start in starts if start > starts[i]
    )
    arena.rewind()
    assert [arena.take(size).data_ptr() for size in (100, 3 << 20, 3 << 20, 9 << 20)] == starts


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).any()),
    ],
)
def test_work_that_looks_at_values_is_refused_and_the_kernels_stay_as_they_were(
    look: Callable[[torch.Tensor], object],
) -> None:
    library = native.library()
    before = library.rabbet_linear  # type: ignore[union-attr]
    x = torch.randn(2, SIZE)
    with pytest.raises(CaptureError, match="aten"):
        capture(lambda: look(x), Arena())
    assert library.rabbet_linear is before  # type: ignore[union-attr]


@torch.inference_mode()
def test_calls_of_other_threads_are_not_recorded() -> None:
    packed = LINEAR.pack(torch.randn(32, SIZE))
    inside = torch.randn(1, SIZE)
    outside = torch.randn(1, SIZE)
    results: list[torch.Tensor] = []

    def work() -> None:
        thread = threading.Thread(target=lambda: results.append(LINEAR.apply(outside, packed)))
        thread.start()
        thread.join()
        results.append(LINEAR.apply(inside, packed))

    session = capture(work, Arena())
    results[0].fill_(5)
    results[1].fill_(5)
    session.replay()
    assert (results[0] == 5).all()
    assert torch.equal(results[1], LINEAR.apply(inside, packed))


def test_conversions_that_may_copy_are_done_again() -> None:
    """In inference mode ``to``, ``reshape`` and ``contiguous`` arrive whole, as views; what they copy is no view."""
    x = torch.zeros(2, 3, dtype=torch.int64)
    out: list[torch.Tensor] = []

    def work() -> None:
        out.append(x.double() + x.t().reshape(2, 3) + x.view(3, 2).t().contiguous().view(2, 3) + x.to(torch.int64))

    with torch.inference_mode():
        session = capture(work, Arena())
        x.copy_(torch.arange(6).view(2, 3))
        session.replay()
        got = out[0].clone()
        work()
    assert torch.equal(got, out[1])
