"""A platform of processor cores in plain torch: one device, Linux's numbers of memory, small operations as their formulas.

torch is imported where it is used: this module is loaded wherever a platform is chosen, on machines without the device too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rabbet.contracts import Refusal, register_platform
from rabbet.contracts.layer_ops import LayerOps
from rabbet.contracts.platform import BatchDefaults, DeviceInfo, MemoryInfo, Platform, PlatformQuery
from rabbet_sdk.strict import seal

if TYPE_CHECKING:
    import torch

__all__ = ["StrictPlatform"]


@register_platform("strict")
@seal
class StrictPlatform(Platform):
    """All cores are one device."""

    device_type = "cpu"

    @classmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        """Asks the system only: no driver is loaded, nothing is kept. A platform whose driver is not there gives ()."""
        return (DeviceInfo(index=0, name="processor cores", arch="generic", total_memory_bytes=_memory()["MemTotal"]),)

    @classmethod
    def supports(cls, query: PlatformQuery) -> tuple[Refusal, ...]:
        """Every reason at once, so that a user mends them all."""
        refusals, cores = [], os.cpu_count() or 1
        if query.dtype not in ("auto", "float32", "bfloat16"):
            refusals.append(
                Refusal(code="DTYPE", message=f"{query.dtype}, not float32 or bfloat16", fix="--dtype float32")
            )
        if query.num_local_ranks > cores:
            refusals.append(Refusal(code="RANKS", message=f"{query.num_local_ranks} ranks on {cores} cores"))
        if query.device_ids:
            refusals.append(Refusal(code="DEVICE_IDS", message=f"there is one device, so no ids: {query.device_ids}"))
        return tuple(refusals)

    @classmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        """Servers have smaller steps, so that nobody waits long. Weights and cache share the memory with other programs."""
        return BatchDefaults(
            max_num_batched_tokens=1024 if is_server else 4096, max_num_seqs=64, memory_fraction=0.8,
            max_kv_cache_bytes=_memory()["MemTotal"] // 8 // world_size,
        )  # fmt: skip

    @classmethod
    def default_dtype(cls, checkpoint_dtype: str) -> str:
        """float16 is slow here, and holds less than bfloat16 does."""
        return "bfloat16" if checkpoint_dtype == "float16" else checkpoint_dtype

    def init_device(self, *, local_rank: int, world_size: int) -> torch.device:
        """Ranks share the cores."""
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        """Free is what nobody uses: the weights of another server on this machine are not ours to take."""
        found, pages = _memory(), int(Path("/proc/self/statm").read_text().split()[1])
        return MemoryInfo(
            total_bytes=found["MemTotal"], free_bytes=found["MemAvailable"],
            used_by_process_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )  # fmt: skip

    def layer_ops(self) -> LayerOps:
        """Replace them by your kernels, one by one."""
        return _Ops()


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}


class _Ops(LayerOps):
    """Every sum in float32, and each result rounded as seldom as possible."""

    def rms_norm(self, x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``LayerOps``."""
        x = x_TN.float()
        return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_N.float()).to(x_TN.dtype)

    def add_rms_norm(
        self, x_TN: torch.Tensor, residual_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LayerOps``. The inputs may be overwritten: one buffer less."""
        total = residual_TN.add_(x_TN)
        return self.rms_norm(total, weight_N, eps), total

    def rotary(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor,
        *, is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See ``LayerOps``. In place: queries and keys are views of one tensor, whose other parts stay."""
        size = cos_sin_PR.shape[1]
        cos, sin = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
        for x in (q_THD[..., :size], k_TKD[..., :size]):
            first, second = x.chunk(2, dim=-1) if is_neox else (x[..., 0::2], x[..., 1::2])
            # Both before either is written: in float32 ``float()`` gives no copy.
            turned = first.float() * cos - second.float() * sin, second.float() * cos + first.float() * sin
            first.copy_(turned[0])
            second.copy_(turned[1])
        return q_THD, k_TKD

    def silu_and_mul(self, gate_up_T2N: torch.Tensor) -> torch.Tensor:
        """See ``LayerOps``."""
        gate, up = gate_up_T2N.float().chunk(2, dim=-1)
        return (gate * gate.sigmoid() * up).to(gate_up_T2N.dtype)

    def gelu_and_mul(self, gate_up_T2N: torch.Tensor, *, approximate: str) -> torch.Tensor:
        """See ``LayerOps``."""
        import torch

        gate, up = gate_up_T2N.float().chunk(2, dim=-1)
        return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(gate_up_T2N.dtype)
