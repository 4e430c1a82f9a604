"""Norms, rotary embedding and gated activations by the compiled kernels."""

from __future__ import annotations

import torch

from rabbet.contracts.layer_ops import LayerOps
from rabbet.layers.reference import TorchLayerOps
from rabbet_hw_cpu import native

__all__ = ["NativeLayerOps"]

_ACTIVATIONS = {"none": 1, "tanh": 2}


class NativeLayerOps(LayerOps):
    """float32 and bfloat16; anything else goes to plain torch."""

    def __init__(self) -> None:
        loaded = native.library()
        assert loaded is not None, "made only where the kernels were compiled"
        self._kernels = loaded
        self._torch = TorchLayerOps()

    def rms_norm(self, x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``LayerOps``."""
        code = native.type_code(x_TN.dtype)
        size = x_TN.shape[-1]
        if x_TN.dim() == 3 and x_TN.stride(1) != size:
            x_TN = x_TN.contiguous()
        if code is None or weight_N.dtype is not x_TN.dtype or x_TN.stride(-1) != 1 or x_TN.dim() not in (2, 3):
            return self._torch.rms_norm(x_TN, weight_N, eps)
        out = torch.empty(x_TN.shape, dtype=x_TN.dtype)
        if x_TN.dim() == 3:
            # Heads of a view: each token's heads are contiguous, tokens are strided.
            for_heads = x_TN if x_TN.is_contiguous() else x_TN.contiguous()
            rows, stride, source = for_heads.shape[0] * for_heads.shape[1], size, for_heads
        else:
            rows, stride, source = x_TN.shape[0], x_TN.stride(0), x_TN
        self._kernels.rabbet_rms_norm(
            source.data_ptr(), weight_N.data_ptr(), out.data_ptr(), rows, size, stride, eps, code
        )
        return out

    def add_rms_norm(
        self, x_TN: torch.Tensor, residual_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LayerOps``. Both inputs are overwritten."""
        code = native.type_code(x_TN.dtype)
        is_plain = x_TN.is_contiguous() and residual_TN.is_contiguous() and x_TN.dim() == 2
        if code is None or not is_plain or weight_N.dtype is not x_TN.dtype or residual_TN.dtype is not x_TN.dtype:
            return self._torch.add_rms_norm(x_TN, residual_TN, weight_N, eps)
        rows, size = x_TN.shape
        self._kernels.rabbet_add_rms_norm(
            x_TN.data_ptr(), residual_TN.data_ptr(), weight_N.data_ptr(), rows, size, eps, code
        )
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
        """See ``LayerOps``. In place."""
        code = native.type_code(q_THD.dtype)
        dim = q_THD.shape[2]
        q_strides, k_strides = q_THD.stride(), k_TKD.stride()
        if code is None or q_strides[1:] != (dim, 1) or k_strides[1:] != (dim, 1) or k_TKD.dtype is not q_THD.dtype:
            return self._torch.rotary(q_THD, k_TKD, positions_T, cos_sin_PR, is_neox=is_neox)
        self._kernels.rabbet_rotary(
            q_THD.data_ptr(), k_TKD.data_ptr(), positions_T.data_ptr(), cos_sin_PR.data_ptr(), q_THD.shape[0],
            q_THD.shape[1], k_TKD.shape[1], dim, cos_sin_PR.shape[1], q_strides[0], k_strides[0], int(is_neox), code,
        )  # fmt: skip
        return q_THD, k_TKD

    def silu_and_mul(self, gate_up_T2N: torch.Tensor) -> torch.Tensor:
        """See ``LayerOps``."""
        return self._gated(gate_up_T2N, 0)

    def gelu_and_mul(self, gate_up_T2N: torch.Tensor, *, approximate: str) -> torch.Tensor:
        """See ``LayerOps``."""
        return self._gated(gate_up_T2N, _ACTIVATIONS[approximate])

    def _gated(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        code = native.type_code(x.dtype)
        if code is None or not x.is_contiguous():
            approximate = "tanh" if activation == 2 else "none"
            return (
                self._torch.silu_and_mul(x) if activation == 0 else self._torch.gelu_and_mul(x, approximate=approximate)
            )
        size = x.shape[-1] // 2
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
        self._kernels.rabbet_gated(x.data_ptr(), out.data_ptr(), x.numel() // (2 * size), size, activation, code)
        return out
