"""The bridge to the compiled kernels: a plain C interface, called through ctypes; absent where nothing was compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.attention import AttentionLayerSpec
    from rabbet.contracts.batch import AttentionBatch

__all__ = ["StepArguments", "attention", "library", "start", "step_arguments"]


@dataclass(frozen=True, slots=True)
class StepArguments:
    """Pointers of one step."""

    batch: AttentionBatch


def library() -> Any:
    """The loaded library, or None."""
    return None


def start(*, num_threads: int, cores: list[int]) -> None:
    """Start the kernels' threads."""
    return None


def step_arguments(batch: AttentionBatch, block_size: int) -> StepArguments | None:
    """Pointers of a step, or None without a library."""
    return None


def attention(
    layer: AttentionLayerSpec,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    kv_cache: torch.Tensor,
    step: StepArguments,
    out_THD: torch.Tensor,
) -> bool:
    """Run the kernel; False if there is none for these tensors."""
    return False
