"""The platform ``rocm``: detection, placement, memory, graphs, and steps that run ahead of the host."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
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
from rabbet_hw_rocm import devices
from rabbet_hw_rocm.devices import Gpu, all_gpus, choose, restrict

if TYPE_CHECKING:
    import torch

__all__ = ["RocmPlatform", "torch_build"]

_GIB = 1 << 30
_ARCHS = frozenset(
    ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201")
)
"""What torch is built for and Triton compiles for."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_PREFERENCES = {"attention": ("triton",), "linear": ("torch",)}
"""Products are torch's own, by hipBLASLt."""


def torch_build() -> tuple[str, str]:
    """Version of the installed torch, and the one of HIP that it was built for; empty where there is none. Imports nothing."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    try:
        text = (Path(next(iter(folders or ()), "")) / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "", ""
    version, hip = (
        re.search(rf"^{name}\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.M) for name in ("__version__", "hip")
    )
    return version[1] if version else "", hip[1] if hip else ""


def _usable() -> tuple[Gpu, ...]:
    """The visible GPUs that kernels run on; others, such as those of many processors, keep their numbers."""
    return tuple(gpu for gpu in restrict(all_gpus()) if gpu.arch in _ARCHS)


def _why_none() -> Refusal:
    """Why no GPU can be used."""
    present, visible = all_gpus(), restrict(all_gpus())
    if not devices.TOPOLOGY.is_dir():
        what, fix = f"no AMD GPU: the amdgpu driver is not loaded ({devices.TOPOLOGY} is not there)", ""
    elif not present:
        what = "no AMD GPU: the amdgpu driver lists none that this process may use"
        fix = "rocminfo; in a container: --device /dev/kfd --device /dev/dri"
    elif not visible:
        named = ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
        what, fix = f"{len(present)} GPUs, all hidden by {named}", "rocminfo lists the GPUs"
    else:
        found = ", ".join(sorted({gpu.arch for gpu in visible}))
        what, fix = f"{found} is not supported; {', '.join(sorted(_ARCHS))} are", ""
    return Refusal(code="NO_DEVICE", message=what, fix=fix)


def _machine_refusals() -> list[Refusal]:
    """What stands in the way of computing on GPUs that are there."""
    refusals = []
    version, hip = torch_build()
    if not hip:
        refusals.append(
            Refusal(
                code="MISSING_LIBRARY",
                message=f"torch {version} is not built for ROCm" if version else "torch is not installed",
                fix="pip install torch --index-url https://download.pytorch.org/whl/rocmX.Y, as pytorch.org says",
            )
        )
    if not os.access(devices.DEVICE, os.R_OK | os.W_OK):
        refusals.append(
            Refusal(
                code="ABSENT",
                message=f"{devices.DEVICE} cannot be opened for reading and writing",
                fix="join the group render; in a container: --device /dev/kfd --device /dev/dri",
            )
        )
    return refusals


@register_platform("rocm")
class RocmPlatform(Platform, SupportsGraphs, SupportsAsyncSteps):
    """One AMD GPU a rank. torch calls such devices ``cuda``, and so does this; ``arch`` tells them apart, e.g. ``gfx942``."""

    device_type = "cuda"

    @classmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        """The visible GPUs that kernels run on."""
        return tuple(
            DeviceInfo(index=gpu.index, name=gpu.name, arch=gpu.arch, total_memory_bytes=gpu.total_memory_bytes)
            for gpu in _usable()
        )

    @classmethod
    def supports(cls, query: PlatformQuery) -> tuple[Refusal, ...]:
        """A torch for ROCm, as many GPUs as ranks, of one architecture, and names that are theirs."""
        gpus = _usable()
        if not gpus:
            return (_why_none(),)
        refusals = _machine_refusals()
        if query.dtype not in _DTYPES:
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype}; {', '.join(_DTYPES)} are supported"))
        try:
            chosen = choose(gpus, query.device_ids) or gpus
        except ValueError as error:
            refusals.append(Refusal(code="DEVICE_IDS", message=str(error), fix="rocminfo lists the GPUs"))
            return tuple(refusals)
        if query.num_local_ranks > len(chosen):
            message = f"{query.num_local_ranks} ranks, but {len(chosen)} GPUs"
            refusals.append(Refusal(code="RANKS", message=message, fix=f"--tensor-parallel-size {len(chosen)}"))
        # The first device's architecture stands for all when kernels are chosen.
        if others := {gpu.arch for gpu in chosen[: query.num_local_ranks]} - {gpus[0].arch}:
            message = f"the first GPU is {gpus[0].arch}, and {', '.join(sorted(others))} would be used"
            refusals.append(
                Refusal(code="ARCH", message=message, fix="hide it by HIP_VISIBLE_DEVICES, not by --device-ids")
            )
        return tuple(refusals)

    @classmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        """By the memory of the smallest GPU."""
        smallest = min((gpu.total_memory_bytes for gpu in _usable()), default=0)
        if smallest >= 70 * _GIB:
            tokens, num_seqs = (8192 if is_server else 16384), 1024
        else:
            tokens, num_seqs = (2048 if is_server else 8192), 256
        return BatchDefaults(max_num_batched_tokens=tokens, max_num_seqs=num_seqs, memory_fraction=0.92)

    @classmethod
    def preferences(cls, kind: str) -> tuple[str, ...]:
        """Best first; what is not installed is passed over."""
        return _PREFERENCES.get(kind, ())

    def __init__(self) -> None:
        self._held_bytes = 0
        self._pool: Any = None

    def init_device(self, *, local_rank: int, world_size: int) -> torch.device:
        """Make the rank's GPU the current one; the environment is left as it is.

        Raises:
            RuntimeError: If HIP numbers the GPUs otherwise than the driver's files do.
        """
        import torch

        visible = restrict(all_gpus())
        gpu = (choose(_usable(), self.device_ids) or _usable())[local_rank]
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found = [item.gcnArchName.partition(":")[0] for item in properties]
        if found != [one.arch for one in visible]:
            raise RuntimeError(
                f"HIP has the GPUs {', '.join(found) or 'none'}, but the driver lists {', '.join(one.arch for one in visible)} "
                f"under {', '.join(_VARIABLES)}; leave these variables out, and choose GPUs by --device-ids"
            )
        device = torch.device(self.device_type, gpu.index)
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

    def collective_backend(self) -> str:
        """RCCL, under the name that torch gives it."""
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
        from rabbet_hw_rocm.sampling import draw

        return draw(logits_BV, batch)

    def capture(self, work: Callable[[], None]) -> GraphSession:
        """See ``SupportsGraphs``. All graphs share one pool of memory, since only one runs at a time."""
        import torch

        from rabbet_hw_rocm.graphs import capture

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(work, self._pool)
