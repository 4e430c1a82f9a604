"""Gated activations."""

from __future__ import annotations

import torch
from torch import nn

from rabbet.layers.context import BuildContext

__all__ = ["GeluAndMul", "SiluAndMul"]


class SiluAndMul(nn.Module):
    """``silu(x[..., :N]) * x[..., N:]``."""

    def __init__(self, *, context: BuildContext) -> None:
        """Take the platform's kernel."""
        super().__init__()
        self.ops = context.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Halve the last axis."""
        return self.ops.silu_and_mul(x)


class GeluAndMul(nn.Module):
    """``gelu(x[..., :N]) * x[..., N:]``."""

    def __init__(self, *, context: BuildContext, approximate: str = "none") -> None:
        """Take the platform's kernel; ``approximate`` is ``none`` or ``tanh``."""
        super().__init__()
        self.ops = context.ops
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Halve the last axis."""
        return self.ops.gelu_and_mul(x, approximate=self.approximate)
