"""A platform without hardware: plain torch on the processor, and numbers of memory that the test sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rabbet.contracts import Refusal, register_platform
from rabbet.contracts.platform import BatchDefaults, DeviceInfo, MemoryInfo, Platform, PlatformQuery

if TYPE_CHECKING:
    import torch

__all__ = ["NullPlatform"]

_GIB = 1 << 30


@register_platform("null")
class NullPlatform(Platform):
    """``--device null``. Tests set the class attributes, and put them back.

    Attributes:
        num_devices: What ``detect`` finds; 0 is a machine without such a device.
        info: What ``memory`` says.
        refusals: What ``supports`` says.
    """

    device_type = "cpu"
    num_devices: ClassVar[int] = 1
    info: ClassVar[MemoryInfo] = MemoryInfo(
        total_bytes=_GIB, free_bytes=_GIB - (1 << 20), used_by_process_bytes=1 << 20
    )
    refusals: ClassVar[tuple[Refusal, ...]] = ()

    @classmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        """As many as the test says."""
        size = cls.info.total_bytes
        return tuple(
            DeviceInfo(index=i, name=f"null {i}", arch="null", total_memory_bytes=size) for i in range(cls.num_devices)
        )

    @classmethod
    def supports(cls, query: PlatformQuery) -> tuple[Refusal, ...]:
        """What the test says."""
        return cls.refusals

    @classmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        """Small."""
        return BatchDefaults(max_num_batched_tokens=64, max_num_seqs=8, memory_fraction=0.5)

    def init_device(self, *, local_rank: int, world_size: int) -> torch.device:
        """The processor, one thread."""
        import torch

        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        """What the test says."""
        return self.info
