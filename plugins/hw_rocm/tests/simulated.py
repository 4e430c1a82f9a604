"""An AMD GPU that the processor plays: the platform's own code over a made-up driver and a made-up ``torch.cuda``.

Written into a throw-away distribution as a module; the driver's files stand beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rabbet_hw_rocm import devices, platform

from rabbet.contracts import register_platform

HERE = Path(__file__).parent
devices.TOPOLOGY, devices.RENDER, devices.DEVICE = HERE / "sys" / "nodes", HERE / "sys" / "drm", HERE / "kfd"
platform.torch_build = lambda: ("2.9.0+rocm6.4", "6.4.4")


@register_platform("rocm_simulated")
class SimulatedRocm(platform.RocmPlatform):
    """Everything is the platform's, but for the type of the device."""

    device_type = "cpu"

    def init_device(self, *, local_rank: int, world_size: int) -> Any:
        """The processor, once the platform has claimed the GPU that it takes it for."""
        import torch

        for name, value in _cuda().items():
            setattr(torch.cuda, name, value)
        assert super().init_device(local_rank=local_rank, world_size=world_size).index == local_rank
        return torch.device("cpu")

    @classmethod
    def preferences(cls, kind: str) -> tuple[str, ...]:
        """Kernels for GPUs do not run here."""
        return ()

    def collective_backend(self) -> str:
        """RCCL has nothing to say to processors."""
        return "gloo"


def _cuda() -> dict[str, Any]:
    """What the platform calls of ``torch.cuda``."""
    import psutil
    import torch
    from rabbet_sdk.mutants.platform import RecordingPlatform

    from rabbet.contracts.platform import CaptureError

    total = devices.all_gpus()[0].total_memory_bytes

    def status(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    class Graph:
        def __init__(self) -> None:
            self.session = RecordingPlatform.session()

        def replay(self) -> None:
            self.session.replay()

    @contextmanager
    def graph(made: Graph, *, pool: str, capture_error_mode: str) -> Iterator[None]:
        assert pool == "pool" and capture_error_mode == "thread_local"
        try:
            with made.session:
                yield
        except CaptureError as error:
            raise RuntimeError(f"HIP error: {error}\nhipErrorStreamCaptureUnsupported") from error

    class Event:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    return {
        "device_count": lambda: len(devices.all_gpus()),
        "get_device_properties": lambda _index: properties,
        "set_device": lambda _device: None,
        "synchronize": lambda: None,
        "empty_cache": gc.collect,
        "mem_get_info": lambda: (
            min(psutil.virtual_memory().available, total),
            min(psutil.virtual_memory().total, total),
        ),
        "memory_reserved": lambda: status("VmRSS"),
        # The process shrinks a little on its own, which must not make a peak too small.
        "memory_allocated": lambda: status("VmRSS") - (4 << 20),
        "max_memory_allocated": lambda: status("VmHWM"),
        "reset_peak_memory_stats": lambda: Path("/proc/self/clear_refs").write_text("5"),
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": Graph,
        "graph": graph,
        "Event": Event,
        "is_available": lambda: False,
        "current_device": lambda: torch.device("cpu"),
    }
