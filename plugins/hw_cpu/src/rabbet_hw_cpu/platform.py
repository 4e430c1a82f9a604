"""The platform ``cpu``: cores, memory, threads and defaults that leave the machine usable."""

from __future__ import annotations

import os
import platform as host
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rabbet.contracts import Refusal, register_platform
from rabbet.contracts.layer_ops import LayerOps
from rabbet.contracts.platform import (
    BatchDefaults,
    DeviceInfo,
    GraphSession,
    MemoryInfo,
    Platform,
    PlatformQuery,
    SupportsGraphs,
)
from rabbet_hw_cpu import machine

if TYPE_CHECKING:
    import torch

    from rabbet_hw_cpu.graphs import Arena

__all__ = ["CpuPlatform", "arch_name"]

_GIB = 1 << 30


@cache
def arch_name() -> str:
    """The widest instruction set that the kernels know: ``amx``, ``avx512_bf16``, ``avx512``, ``avx2`` or ``generic``."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "generic"
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    have = set(line.split())
    for name, needed in (
        ("amx", {"amx_bf16", "amx_tile", "avx512_bf16"}),
        ("avx512_bf16", {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}),
        ("avx512", {"avx512f", "avx512bw", "avx512vl"}),
        ("avx2", {"avx2", "fma"}),
    ):
        if needed <= have:
            return name
    return "generic"


@register_platform("cpu")
class CpuPlatform(Platform, SupportsGraphs):
    """The processor cores that this process may use."""

    device_type = "cpu"

    @classmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        """One device: all cores together."""
        name = host.processor() or host.machine()
        return (DeviceInfo(index=0, name=name, arch=arch_name(), total_memory_bytes=machine.memory_limit_bytes()),)

    @classmethod
    def supports(cls, query: PlatformQuery) -> tuple[Refusal, ...]:
        """float32 and bfloat16; as many ranks as there are cores."""
        refusals = []
        if query.dtype not in ("auto", "float32", "bfloat16"):
            message = f"{query.dtype}; float32 and bfloat16 are fast on CPUs"
            refusals.append(Refusal(code="DTYPE", message=message, fix="--dtype bfloat16 or float32"))
        cores = len(machine.cores())
        if query.num_local_ranks > cores:
            message = f"{query.num_local_ranks} ranks, but only {cores} cores"
            refusals.append(Refusal(code="RANKS", message=message, fix=f"--tensor-parallel-size {cores} or less"))
        if query.device_ids:
            refusals.append(Refusal(code="DEVICE_IDS", message="cores are chosen with taskset, not --device-ids"))
        return tuple(refusals)

    @classmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        """Budgets for a few cores, and a KV cache that takes at most a quarter of the memory and 4 GiB."""
        return BatchDefaults(
            max_num_batched_tokens=(2048 if is_server else 4096) * world_size,
            max_num_seqs=(128 if is_server else 256) * world_size,
            memory_fraction=0.9,
            max_kv_cache_bytes=min(4 * _GIB, machine.memory_limit_bytes() // 4 // world_size),
        )

    @classmethod
    def default_dtype(cls, checkpoint_dtype: str) -> str:
        """bfloat16 for 16-bit checkpoints where the processor multiplies it; float32 otherwise."""
        is_fast = arch_name() in ("amx", "avx512_bf16")
        return "bfloat16" if checkpoint_dtype in ("bfloat16", "float16") and is_fast else "float32"

    @classmethod
    def preferences(cls, kind: str) -> tuple[str, ...]:
        """This package's own kernels."""
        return ("cpu",) if kind in ("attention", "linear") else ()

    def __init__(self) -> None:
        self._ops: LayerOps | None = None
        self._world_size = 1
        self._arena: Arena | None = None

    def init_device(self, *, local_rank: int, world_size: int) -> torch.device:
        """Give this rank its share of the cores, and as many threads."""
        import torch

        from rabbet_hw_cpu import native

        self._world_size = world_size
        cores, is_whole = machine.cores(), machine.are_cores_whole()
        share = max(1, len(cores) // world_size)
        mine = cores[local_rank * share : (local_rank + 1) * share] or cores[-1:]
        if world_size > 1 and is_whole:
            os.sched_setaffinity(0, mine)
        # Threads of torch wait for their next work in a loop, for milliseconds, on the cores that the kernels need.
        torch.set_num_threads(1 if native.library() is not None else len(mine))
        native.start(num_threads=len(mine), cores=mine if is_whole else None)
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        """Of this process and of the machine, or of the container where there is less."""
        use = machine.MemoryUse()
        return MemoryInfo(
            total_bytes=use.limit_bytes // self._world_size,
            free_bytes=use.free_bytes // self._world_size,
            used_by_process_bytes=int(psutil.Process().memory_info().rss),
        )

    def layer_ops(self) -> LayerOps | None:
        """Compiled operations, or None where nothing was compiled."""
        from rabbet_hw_cpu import native

        if self._ops is None and native.library() is not None:
            from rabbet_hw_cpu.ops import NativeLayerOps

            self._ops = NativeLayerOps()
        return self._ops

    def capture(self, work: Callable[[], None]) -> GraphSession:
        """See ``SupportsGraphs``."""
        from rabbet_hw_cpu.graphs import Arena, capture

        if self._arena is None:
            self._arena = Arena()
        return capture(work, self._arena)
