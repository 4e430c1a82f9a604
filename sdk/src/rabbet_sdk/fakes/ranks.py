"""Ranks without processes, and a build context for layers that are tested alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rabbet.layers import BuildContext
from rabbet.layers.reference import TorchLayerOps, TorchLinearBackend
from rabbet.parallel import ParallelState

__all__ = ["SilentRanks", "ThreadRanks", "build_context"]


class SilentRanks(ParallelState):
    """A rank whose sums are left to the test: collectives return their input."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The input."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The input."""
        return tensor


class ThreadRanks:
    """Ranks that are threads of this process; their collectives wait for one another for at most a minute."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks."""
        self._slots[rank] = tensor.clone()
        self._barrier.wait()
        parts = list(self._slots)
        self._barrier.wait()
        return parts

    def run(self, work: Callable[[ParallelState], Any]) -> list[Any]:
        """``work(state)`` on each rank; raises the first error of any of them.

        Raises:
            BaseException: What a rank raised.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def start(rank: int) -> None:
            try:
                results[rank] = work(_ThreadState(rank, self.size, self))
            except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class _ThreadState(ParallelState):
    """One of the threads."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, in place."""
        return tensor.copy_(torch.stack(self.group.exchange(self.tp_rank, tensor)).sum(0))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenation."""
        return torch.cat(self.group.exchange(self.tp_rank, tensor), dim=dim)


def build_context(parallel: ParallelState | None = None, **changes: Any) -> BuildContext:
    """A context of plain torch kernels in float32 on the CPU; ``changes`` are fields of ``BuildContext``."""
    values: dict[str, Any] = {
        "parallel": parallel or ParallelState.single(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "linear": TorchLinearBackend(),
        "ops": TorchLayerOps(),
        "kv_cache_dtype": "float32",
        "max_model_len": 64,
    }
    return BuildContext(**(values | changes))
