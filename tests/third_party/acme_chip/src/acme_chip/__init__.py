"""A chip that looks to torch like a CPU: one device, plain torch operations, its own budgets."""

import os

from rabbet.contracts import Refusal, register_platform
from rabbet.contracts.platform import BatchDefaults, DeviceInfo, MemoryInfo, Platform

_MEMORY = 2 << 30


@register_platform("acme_chip")
class AcmeChip(Platform):
    device_type = "cpu"

    @classmethod
    def detect(cls):
        return (DeviceInfo(index=0, name="Acme One", arch="acme1", total_memory_bytes=_MEMORY),)

    @classmethod
    def supports(cls, query):
        return () if query.dtype in ("float32", "auto") else (Refusal(code="DTYPE", message=f"{query.dtype} is not float32"),)

    @classmethod
    def batch_defaults(cls, *, is_server, world_size):
        return BatchDefaults(max_num_batched_tokens=512, max_num_seqs=8, memory_fraction=0.5, max_kv_cache_bytes=64 << 20)

    @classmethod
    def default_dtype(cls, checkpoint_dtype):
        return "float32"

    def init_device(self, *, local_rank, world_size):
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        return torch.device("cpu")

    def memory(self):
        return MemoryInfo(total_bytes=_MEMORY, free_bytes=_MEMORY, used_by_process_bytes=0)
