"""Norms. Source: RMSNorm arXiv 1910.07467, LayerNorm arXiv 1607.06450."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rabbet.layers.context import BuildContext

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """Root-mean-square norm, with the residual addition in front of it where one is given."""

    def __init__(self, size: int, *, eps: float, context: BuildContext, prefix: str = "") -> None:
        """Create the weight of ``size`` elements."""
        super().__init__()
        self.prefix = prefix
        self.eps = eps
        self.ops = context.ops
        self.weight = nn.Parameter(torch.ones(size, dtype=context.dtype, device=context.device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; both inputs may be overwritten."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with bias."""

    def __init__(self, size: int, *, eps: float, context: BuildContext, prefix: str = "", bias: bool = True) -> None:
        """Create weight and bias of ``size`` elements."""
        super().__init__()
        self.prefix = prefix
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=context.dtype, device=context.device), requires_grad=False)
        zeros = torch.zeros(size, dtype=context.dtype, device=context.device)
        self.bias = nn.Parameter(zeros, requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
