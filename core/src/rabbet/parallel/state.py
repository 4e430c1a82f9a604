"""Ranks and their collectives, as an object that is handed to layers; no layer asks torch.distributed itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["DEFAULT_GROUP", "ParallelState", "init_parallel"]

DEFAULT_GROUP = "default"


@dataclass(frozen=True, slots=True)
class ParallelState:
    """This rank's place among the ranks that share each layer.

    Attributes:
        tp_rank: 0 .. tp_size - 1.
        tp_size: Ranks that share a layer.
        group: A process group, or ``DEFAULT_GROUP``: all ranks that have joined. None for one rank.
    """

    tp_rank: int = 0
    tp_size: int = 1
    group: Any = None

    def _process_group(self) -> Any:
        """What torch.distributed takes; it looks the default group up itself."""
        return None if self.group == DEFAULT_GROUP else self.group

    @classmethod
    def single(cls) -> ParallelState:
        """One rank: every collective returns its input."""
        return cls()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.tp_size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self._process_group())
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenation of all ranks' tensors along ``dim``; all have the same shape."""
        if self.tp_size == 1:
            return tensor
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(tensor) for _ in range(self.tp_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._process_group())
        return torch.cat(parts, dim=dim)


def init_parallel(*, rank: int, world_size: int, init_method: str, backend: str) -> ParallelState:
    """Join the ranks; blocks until all have come.

    Args:
        rank: This rank.
        world_size: All ranks.
        init_method: As for ``torch.distributed.init_process_group``, e.g. ``file:///...``.
        backend: ``gloo``, ``nccl``, ...
    """
    if world_size == 1:
        return ParallelState.single()
    import torch.distributed as dist

    # Ranks of one machine: gloo would listen at whatever address the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    # By name: an object kept in layers would outlive destroy_process_group, and its threads would then be torn down at
    # the interpreter's exit, which aborts the process now and then.
    return ParallelState(rank, world_size, DEFAULT_GROUP)
