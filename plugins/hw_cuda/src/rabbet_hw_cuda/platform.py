"""The platform ``cuda``: detection, placement, memory, graphs, and steps that run ahead of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rabbet.contracts import Refusal, register_platform
from rabbet.contracts.platform import (
    BatchDefaults,
    DeviceInfo,
    DrawBatch,
    GraphSession,
    MemoryInfo,
    Platform,
    PlatformQuery,
    SupportsAsyncSteps,
    SupportsGraphs,
)
from rabbet_hw_cuda.devices import Gpu, choose, visible_gpus

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.layer_ops import LayerOps

__all__ = ["CudaPlatform"]

_GIB = 1 << 30
_OLDEST = 80
_DTYPES = ("float32", "bfloat16", "float16", "auto")
_PREFERENCES = {"attention": ("triton",), "linear": ("cuda",)}


def _is_usable(gpu: Gpu) -> bool:
    """Whether the kernels run on it."""
    return int(gpu.arch.removeprefix("sm_")) >= _OLDEST


@register_platform("cuda")
class CudaPlatform(Platform, SupportsGraphs, SupportsAsyncSteps):
    """One NVIDIA GPU a rank, of compute capability 8.0 or newer."""

    device_type = "cuda"

    @classmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        """The visible GPUs that the kernels run on."""
        return tuple(
            DeviceInfo(index=gpu.index, name=gpu.name, arch=gpu.arch, total_memory_bytes=gpu.total_memory_bytes)
            for gpu in visible_gpus()
            if _is_usable(gpu)
        )

    @classmethod
    def supports(cls, query: PlatformQuery) -> tuple[Refusal, ...]:
        """As many GPUs as ranks, and names that are theirs."""
        refusals = []
        gpus = visible_gpus()
        count = sum(map(_is_usable, gpus))
        if not count:
            what = "the driver tells of no GPU that may be used" if not gpus else f"no GPU of capability {_OLDEST / 10} or newer"
            return (Refusal(code="NO_DEVICE", message=what, fix="nvidia-smi -L; CUDA_VISIBLE_DEVICES"),)
        if query.dtype not in _DTYPES:
            message = f"{query.dtype}; {', '.join(_DTYPES)} are supported"
            refusals.append(Refusal(code="DTYPE", message=message, fix="--dtype bfloat16"))
        if query.device_ids:
            try:
                count = len(choose(gpus, query.device_ids))
            except ValueError as error:
                refusals.append(Refusal(code="DEVICE_IDS", message=str(error), fix="nvidia-smi -L lists the GPUs"))
        if not refusals and query.num_local_ranks > count:
            message = f"{query.num_local_ranks} ranks, but {count} GPUs"
            refusals.append(Refusal(code="RANKS", message=message, fix=f"--tensor-parallel-size {count}"))
        return tuple(refusals)

    @classmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        """By the memory of the smallest GPU."""
        smallest = min((device.total_memory_bytes for device in cls.detect()), default=0)
        if smallest >= 70 * _GIB:
            tokens = 8192 if is_server and smallest < 160 * _GIB else 16384
            return BatchDefaults(max_num_batched_tokens=tokens, max_num_seqs=1024, memory_fraction=0.92)
        return BatchDefaults(
            max_num_batched_tokens=2048 if is_server else 8192, max_num_seqs=256, memory_fraction=0.92
        )

    @classmethod
    def preferences(cls, kind: str) -> tuple[str, ...]:
        """Best first; what is not installed is passed over."""
        return _PREFERENCES.get(kind, ())

    def __init__(self) -> None:
        self._ops: LayerOps | None = None
        self._held_bytes = 0
        self._pool: Any = None

    def init_device(self, *, local_rank: int, world_size: int) -> torch.device:
        """Make the rank's GPU the current one; the environment is left as it is."""
        import torch

        index = local_rank
        if self.device_ids:
            wanted = choose(visible_gpus(), self.device_ids)[local_rank].uuid.removeprefix("GPU-")
            uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
            index = uuids.index(wanted)
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device

    def memory(self) -> MemoryInfo:
        """See ``Platform``; what the allocator keeps for later counts as free."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        torch.cuda.reset_peak_memory_stats()
        self._held_bytes = torch.cuda.memory_allocated()
        return MemoryInfo(total_bytes=total, free_bytes=free, used_by_process_bytes=torch.cuda.memory_reserved())

    def peak_activation_bytes(self) -> int | None:
        """See ``Platform``."""
        import torch

        return max(0, torch.cuda.max_memory_allocated() - self._held_bytes)

    def layer_ops(self) -> LayerOps | None:
        """Operations in Triton."""
        if self._ops is None:
            from rabbet_hw_cuda.ops import TritonLayerOps

            self._ops = TritonLayerOps()
        return self._ops

    def collective_backend(self) -> str:
        """NCCL."""
        return "nccl"

    def synchronize(self) -> None:
        """See ``Platform``."""
        import torch

        torch.cuda.synchronize()

    def mark(self) -> Callable[[], None]:
        """See ``SupportsAsyncSteps``."""
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def draw(self, logits_BV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
        """See ``SupportsAsyncSteps``."""
        from rabbet_hw_cuda.sampling import draw

        return draw(logits_BV, batch)

    def capture(self, work: Callable[[], None]) -> GraphSession:
        """See ``SupportsGraphs``. All graphs share one pool of memory, since only one runs at a time."""
        import torch

        from rabbet_hw_cuda.graphs import capture

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(work, self._pool)
