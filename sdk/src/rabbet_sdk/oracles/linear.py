"""Linear layers and gated units by their definitions."""

from __future__ import annotations

import torch

__all__ = ["gated_silu", "linear"]


def linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``x @ weight.T + bias``, all in ``dtype``: float64 for the oracle, float32 for the plain computation."""
    out = x_TI.to(dtype) @ weight_OI.to(dtype).T
    return out if bias_O is None else out + bias_O.to(dtype)


def gated_silu(both_T2N: torch.Tensor) -> torch.Tensor:
    """``g / (1 + exp(-g)) * u`` of the two halves of the last axis, in their type."""
    gate, up = both_T2N.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
