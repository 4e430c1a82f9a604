"""Contract of the small fused operations that a platform may offer to the layers. Not a plugin kind of its own.

Shapes: T tokens, N hidden size, H heads, D head size. All tensors live on the platform's device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["LayerOps"]


class LayerOps(ABC):
    """Norms, rotary embedding and gated activations.

    An implementation accepts every dtype that its platform's ``supports`` accepts, and any T including 0.
    Rounding: each result is within 2 times the error of the plain torch form in the same dtype, against float64.
    """

    @abstractmethod
    def rms_norm(self, x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, statistics in float32. Leading axes are free.

        Returns a new tensor of the shape and dtype of ``x_TN``. Source: arXiv 1910.07467.
        """

    @abstractmethod
    def add_rms_norm(
        self, x_TN: torch.Tensor, residual_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``r = x + residual``; returns ``(rms_norm(r), r)``. May overwrite both inputs; the caller uses the results only."""

    @abstractmethod
    def rotary(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        *,
        is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first R elements of each head by the angles of its position.

        Args:
            q_THD: Queries, last axis contiguous; may be a view into a larger tensor. Overwritten.
            k_TKD: Keys, likewise.
            positions_T: int64 positions, each < P.
            cos_sin_PR: float32; row p holds R/2 cosines, then R/2 sines.
            is_neox: Pairs are (i, i + R/2); otherwise (2i, 2i + 1).

        Returns:
            The rotated queries and keys, which may be the inputs themselves. Source: arXiv 2104.09864.
        """

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
        """``rms_norm`` of each head, then ``rotary``; arguments and results as there. One kernel where there is one."""
        q_THD, k_TKD = self.rms_norm(q_THD, q_weight_D, eps), self.rms_norm(k_TKD, k_weight_D, eps)
        return self.rotary(q_THD, k_TKD, positions_T, cos_sin_PR, is_neox=is_neox)

    @abstractmethod
    def silu_and_mul(self, gate_up_T2N: torch.Tensor) -> torch.Tensor:
        """``silu(x[..., :N]) * x[..., N:]``. Source: arXiv 2002.05202."""

    @abstractmethod
    def gelu_and_mul(self, gate_up_T2N: torch.Tensor, *, approximate: str) -> torch.Tensor:
        """``gelu(x[..., :N]) * x[..., N:]`` with ``approximate`` ``none`` or ``tanh``."""
