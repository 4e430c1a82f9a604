"""The kernels' threads: restarts, callers at the same time, forks, and rest."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from rabbet_hw_cpu import native
from rabbet_hw_cpu.linear import CpuLinear

needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="no compiler was there when the package was installed"
)
X = torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(640, 96, generator=torch.Generator().manual_seed(2))


def result() -> torch.Tensor:
    backend = CpuLinear()
    return backend.apply(X, backend.pack(WEIGHT))


@needs_kernels
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    results = []
    for count in (1, 2, 5, 2):
        native.start(num_threads=count, cores=None)
        results.append(result())
    assert all(torch.equal(one, results[0]) for one in results)


@needs_kernels
def test_callers_at_the_same_time_get_their_own_results() -> None:
    native.start(num_threads=3, cores=None)
    backend = CpuLinear()
    packed = [backend.pack(WEIGHT * scale) for scale in (1, 2, 4, 8)]
    wanted = [backend.apply(X, one) for one in packed]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(backend.apply(X, packed[index]), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []


@needs_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes_alone() -> None:
    native.start(num_threads=2, cores=None)
    wanted = result()
    expected = wanted.numpy().tobytes()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.equal(wanted, wanted)  # torch has its own threads now, as after other tests: the child must not need those
    torch.set_num_threads(threads_before)
    child = os.fork()
    if child == 0:
        os._exit(0 if result().numpy().tobytes() == expected else 1)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    if done[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)
    assert torch.equal(result(), wanted)


@needs_kernels
def test_threads_without_work_use_no_processor_time() -> None:
    native.start(num_threads=2, cores=None)
    result()
    threading.Event().wait(0.05)
    before = time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - before < 0.1


def test_a_missing_library_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FILE", Path("/nowhere/_kernels.so"))
    native.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="rabbet_hw_cpu"):
            assert native.library() is None
            assert native.library() is None
        assert len(caplog.records) == 1 and "plain torch" in caplog.text
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
        assert native.library() is not None or not native._FILE.exists()
