"""Build contexts of one rank or several, and a quantisation method that stores eight values an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rabbet.layers import BuildContext
from rabbet.layers.reference import TorchLayerOps, TorchLinearBackend
from rabbet.parallel import ParallelState


class SilentRanks(ParallelState):
    """A rank whose sums are left to the test: collectives return their input."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor


def make_context(rank: int = 0, size: int = 1, **changes: Any) -> BuildContext:
    values: dict[str, Any] = {
        "parallel": SilentRanks(rank, size),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "linear": TorchLinearBackend(),
        "ops": TorchLayerOps(),
        "kv_cache_dtype": "float32",
        "max_model_len": 64,
    }
    return BuildContext(**(values | changes))


@pytest.fixture
def context() -> Callable[..., BuildContext]:
    return make_context
