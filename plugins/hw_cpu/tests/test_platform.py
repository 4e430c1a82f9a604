"""The platform's numbers, on this machine and inside made-up containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from rabbet_hw_cpu import machine, native
from rabbet_hw_cpu import platform as module
from rabbet_hw_cpu.platform import CpuPlatform

from rabbet.contracts.platform import PlatformQuery

GIB = 1 << 30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of version 2, two levels deep, without limits."""
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    (tmp_path / "root/outer/inner").mkdir(parents=True)
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "root")
    return tmp_path / "root"


def test_platform_says_what_is_there() -> None:
    (device,) = CpuPlatform.detect()
    memory = CpuPlatform().memory()
    assert device.total_memory_bytes == memory.total_bytes > 0
    assert 0 < memory.used_by_process_bytes < memory.total_bytes
    assert 0 < memory.free_bytes < memory.total_bytes


def test_budgets_leave_the_machine_usable() -> None:
    server, offline = (CpuPlatform.batch_defaults(is_server=flag, world_size=1) for flag in (True, False))
    assert (server.max_num_batched_tokens, server.max_num_seqs) == (2048, 128)
    assert (offline.max_num_batched_tokens, offline.max_num_seqs) == (4096, 256)
    assert server.max_kv_cache_bytes is not None
    assert server.max_kv_cache_bytes <= min(4 * GIB, machine.memory_limit_bytes() // 4)


def test_more_ranks_than_cores_and_float16_are_refused() -> None:
    query = PlatformQuery(dtype="float16", num_local_ranks=len(machine.cores()) + 1, device_ids=("0",))
    assert [refusal.code for refusal in CpuPlatform.supports(query)] == ["DTYPE", "RANKS", "DEVICE_IDS"]
    assert CpuPlatform.supports(PlatformQuery(dtype="bfloat16")) == ()


@pytest.mark.parametrize(
    ("arch", "checkpoint", "wanted"),
    [
        ("amx", "bfloat16", "bfloat16"), ("avx512_bf16", "float16", "bfloat16"), ("amx", "float32", "float32"),
        ("avx512", "bfloat16", "float32"), ("generic", "float16", "float32"),
    ],
)  # fmt: skip
def test_default_type_is_what_the_processor_multiplies(
    arch: str, checkpoint: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "arch_name", lambda: arch)
    assert CpuPlatform.default_dtype(checkpoint) == wanted


def test_the_least_memory_limit_of_the_groups_counts(container: Path) -> None:
    inner, outer = container / "outer/inner", container / "outer"
    (inner / "memory.max").write_text("max\n")
    (outer / "memory.max").write_text(f"{2 * GIB}\n")
    (outer / "memory.current").write_text(f"{GIB}\n")
    (outer / "memory.stat").write_text(f"anon {GIB // 4}\ninactive_file {GIB // 2}\n")
    assert machine.memory_limit_bytes() == 2 * GIB
    memory = CpuPlatform().memory()
    assert memory.total_bytes == 2 * GIB
    # Half of what the group holds is files that may be dropped.
    assert memory.free_bytes == 2 * GIB - GIB // 2


def test_limits_of_version_1(container: Path, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("5:cpu,cpuacct:/job\n3:memory:/job\n")
    (container / "memory/job").mkdir(parents=True)
    (container / "memory/job/memory.limit_in_bytes").write_text(f"{GIB}\n")
    (container / "memory/job/memory.usage_in_bytes").write_text(f"{GIB // 2}\n")
    assert machine.memory_limit_bytes() == GIB
    assert machine.MemoryUse().free_bytes == GIB // 2


def test_a_share_of_processor_time_limits_the_threads(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7}, raising=False)
    assert machine.cores() == [2, 3, 5, 7] and machine.are_cores_whole()
    (container / "outer/cpu.max").write_text("150000 100000\n")
    assert machine.cores() == [2, 3] and not machine.are_cores_whole()
    (container / "outer/inner").joinpath("cpu.max").write_text("1000 100000\n")
    assert machine.cores() == [2]


def test_unreadable_groups_are_no_limit(container: Path) -> None:
    (container / "outer/memory.max").write_text("nonsense")
    (container / "outer/cpu.max").write_text("")
    (container.parent / "membership").write_text("nonsense\n")
    assert machine.memory_limit_bytes() > 0 and machine.cores()


def test_the_first_rank_of_one_keeps_its_cores_and_starts_threads() -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        assert CpuPlatform().init_device(local_rank=0, world_size=1) == torch.device("cpu")
        assert os.sched_getaffinity(0) == before
        if native.library() is not None:
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_arch_is_read_from_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def flags(text: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"flags : {text}\n")
        module.arch_name.cache_clear()
        return module.arch_name()

    try:
        assert flags("avx2 fma avx512f avx512bw avx512vl avx512_bf16 amx_tile amx_bf16") == "amx"
        assert flags("avx2 fma avx512f avx512bw avx512vl avx512_bf16") == "avx512_bf16"
        assert flags("avx2 fma avx512f avx512bw avx512vl") == "avx512"
        assert flags("avx2 fma") == "avx2"
        assert flags("sse2") == "generic"
    finally:
        monkeypatch.undo()
        module.arch_name.cache_clear()


def test_modules_that_the_front_process_imports_do_without_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, rabbet_hw_cpu.platform as p, rabbet_hw_cpu.attention, rabbet_hw_cpu.linear;"
        "p.CpuPlatform.detect(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
