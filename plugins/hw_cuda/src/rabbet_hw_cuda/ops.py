"""Norms, rotary embedding and gated activations by kernels in Triton.

Shapes: T tokens, N hidden size, H heads, D head size.
"""

from __future__ import annotations

import torch
from rabbet_triton.launch import Kernel, dependence

from rabbet.contracts.layer_ops import LayerOps
from rabbet_hw_cuda.ops_kernels import gated_kernel, rms_norm_kernel, rotary_kernel

__all__ = ["TritonLayerOps"]

_rms_norm, _rotary, _gated = Kernel(rms_norm_kernel), Kernel(rotary_kernel), Kernel(gated_kernel)
_HEADS = 4
"""Heads of a program: enough bytes to be worth one, and enough programs for one token."""
_BLOCK = 1024
_KINDS = {"none": 1, "tanh": 2}


def _width(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _warps(width: int) -> int:
    """Of a program that holds a row: up to 16 elements a thread."""
    return max(1, min(16, width // 512))


class TritonLayerOps(LayerOps):
    """float32, bfloat16 and float16 on one GPU."""

    def rms_norm(self, x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``LayerOps``."""
        size = x_TN.shape[-1]
        if x_TN.dim() != 3 or x_TN.stride(-1) != 1:
            x_TN = x_TN.contiguous()
        shape = x_TN.shape
        if x_TN.dim() == 3:
            inner, outer_stride, inner_stride = shape[1], x_TN.stride(0), x_TN.stride(1)
        else:
            inner, outer_stride, inner_stride = 1, size, 0
        out = torch.empty(shape, dtype=x_TN.dtype, device=x_TN.device)
        rows = out.numel() // size if size else 0
        if rows:
            width = _width(size)
            _rms_norm(
                (rows, 1, 1), x_TN, x_TN, weight_N, out, outer_stride, inner_stride, inner, eps, size, width, False,
                dependence(x_TN, is_small=rows == 1), num_warps=_warps(width),
            )  # fmt: skip
        return out

    def add_rms_norm(
        self, x_TN: torch.Tensor, residual_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LayerOps``; both inputs are overwritten where they are contiguous."""
        x_TN, residual_TN = x_TN.contiguous(), residual_TN.contiguous()
        size = x_TN.shape[-1]
        rows = x_TN.numel() // size if size else 0
        if rows:
            width = _width(size)
            _rms_norm(
                (rows, 1, 1), x_TN, residual_TN, weight_N, x_TN, size, 0, 1, eps, size, width, True,
                dependence(x_TN, is_small=rows == 1), num_warps=_warps(width),
            )  # fmt: skip
        return x_TN, residual_TN

    def rotary(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        *,
        is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LayerOps``; in place."""
        return self._rotary(q_THD, k_TKD, None, None, 0.0, positions_T, cos_sin_PR, is_neox=is_neox)

    def norm_rotary(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        q_weight_D: torch.Tensor,
        k_weight_D: torch.Tensor,
        eps: float,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        *,
        is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LayerOps``; in place."""
        return self._rotary(q_THD, k_TKD, q_weight_D, k_weight_D, eps, positions_T, cos_sin_PR, is_neox=is_neox)

    def _rotary(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        q_weight_D: torch.Tensor | None,
        k_weight_D: torch.Tensor | None,
        eps: float,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        *,
        is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, num_heads, size = q_THD.shape
        if num_tokens == 0:
            return q_THD, k_TKD
        num_kv_heads, half = k_TKD.shape[1], cos_sin_PR.shape[1] // 2
        rest = size - 2 * half
        parts = -(-num_heads // _HEADS) + -(-num_kv_heads // _HEADS)
        _rotary(
            (num_tokens, parts, 1), q_THD, k_TKD, positions_T, cos_sin_PR,
            cos_sin_PR if q_weight_D is None else q_weight_D, cos_sin_PR if k_weight_D is None else k_weight_D, eps,
            q_THD.stride(0), q_THD.stride(1), k_TKD.stride(0), k_TKD.stride(1),
            num_heads, num_kv_heads, size, half, _width(half), _width(rest) if rest else 0,
            _HEADS, is_neox, q_weight_D is not None, dependence(q_THD, is_small=num_tokens == 1), num_warps=1,
        )  # fmt: skip
        return q_THD, k_TKD

    def silu_and_mul(self, gate_up_T2N: torch.Tensor) -> torch.Tensor:
        """See ``LayerOps``."""
        return self._gated(gate_up_T2N, 0)

    def gelu_and_mul(self, gate_up_T2N: torch.Tensor, *, approximate: str) -> torch.Tensor:
        """See ``LayerOps``."""
        return self._gated(gate_up_T2N, _KINDS[approximate])

    def _gated(self, x_T2N: torch.Tensor, kind: int) -> torch.Tensor:
        x_T2N = x_T2N.contiguous()
        size = x_T2N.shape[-1] // 2
        out = torch.empty((*x_T2N.shape[:-1], size), dtype=x_T2N.dtype, device=x_T2N.device)
        rows = out.numel() // size if size else 0
        if rows:
            grid = (rows, -(-size // _BLOCK), 1)
            _gated(grid, x_T2N, out, 2 * size, size, _BLOCK, kind, dependence(x_T2N, is_small=rows == 1), num_warps=4)
        return out
