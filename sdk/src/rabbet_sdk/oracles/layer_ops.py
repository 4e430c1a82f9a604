"""Norms, rotary embedding and gated activations by their definitions.

Each computes in the type ``dtype``: float64 for the oracle, float32 for the statistics of the plain form.
Shapes: T tokens, N hidden size, H heads, D head size, P positions, R rotated elements.
"""

from __future__ import annotations

import math

import torch

__all__ = ["gated", "rms_norm", "rotary"]


def rms_norm(x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``; arXiv 1910.07467."""
    x = x_TN.to(dtype)
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight_N.to(dtype)


def rotary(
    x_THD: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor, *, is_neox: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Each pair as a complex number, times that of its angle; arXiv 2104.09864. The elements behind R stay."""
    half = cos_sin_PR.shape[1] // 2
    low = torch.arange(half, device=x_THD.device)
    first, second = (low, low + half) if is_neox else (2 * low, 2 * low + 1)
    angle = cos_sin_PR.to(dtype)[positions_T].unsqueeze(1)
    turned = torch.complex(x_THD[..., first].to(dtype), x_THD[..., second].to(dtype)) * torch.complex(
        angle[..., :half].contiguous(), angle[..., half:].contiguous()
    )
    out = x_THD.to(dtype, copy=True)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def gated(gate_up_T2N: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(x[..., :N]) * x[..., N:]`` in float64; ``silu``, ``gelu`` or ``gelu_tanh``."""
    size = gate_up_T2N.shape[-1] // 2
    gate, up = gate_up_T2N[..., :size].double(), gate_up_T2N[..., size:].double()
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "gelu":
        erfc: torch.Tensor = torch.special.erfc(-gate / math.sqrt(2))
        return gate * 0.5 * erfc * up
    return gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)) * up
