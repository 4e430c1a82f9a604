"""Contracts of linear and mixture-of-experts kernels for weights that no quantisation method claims.

Shapes: T tokens, I input size, O output size, X experts, A experts a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch

__all__ = ["LinearBackend", "LinearQuery", "MoEBackend", "MoEQuery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearQuery:
    """A kind of linear layer: device, types, and ``scheme`` (``none`` for dense weights, else a method's name)."""

    device_type: str
    arch: str
    dtype: str
    weight_dtype: str
    scheme: str = "none"


class LinearBackend(ABC):
    """Dense matrix products. One instance a rank; ``pack`` once a weight, ``apply`` once a call."""

    @classmethod
    @abstractmethod
    def supports(cls, query: LinearQuery) -> tuple[Refusal, ...]:
        """Every reason why the query cannot be served; empty: it can."""

    @abstractmethod
    def pack(self, weight_OI: torch.Tensor) -> Any:
        """Bring a weight into the form that ``apply`` takes, after loading. The caller drops the original.

        Returning ``weight_OI`` itself is fine. What is returned is opaque to core.
        """

    @abstractmethod
    def apply(self, x_TI: torch.Tensor, packed: Any, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``, accumulated in float32, in the dtype of ``x_TI``. Leading axes are free."""

    def apply_gated_silu(self, x_TI: torch.Tensor, packed: Any) -> torch.Tensor | None:
        """``silu(y[..., :O/2]) * y[..., O/2:]`` with ``y = x @ weight.T`` in one kernel; None where there is none."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEQuery:
    """A kind of expert layer: device, type, sizes, ``activation`` and ``scheme`` (``none`` for dense experts).

    ``num_local_experts`` is below ``num_experts`` where other ranks hold the rest. ``apply`` is not told of the activation,
    so a backend refuses all but ``silu``.
    """

    device_type: str
    arch: str
    dtype: str
    num_experts: int
    num_local_experts: int
    top_k: int
    activation: str = "silu"
    scheme: str = "none"


class MoEBackend(ABC):
    """Gated experts: ``sum_a w_a * down_a(act(gate_a(x)) * up_a(x))`` over the experts chosen for each token."""

    @classmethod
    @abstractmethod
    def supports(cls, query: MoEQuery) -> tuple[Refusal, ...]:
        """Every reason why the query cannot be served; empty: it can."""

    @abstractmethod
    def pack(self, gate_up_X2NI: torch.Tensor, down_XIN: torch.Tensor) -> Any:
        """Bring the weights of the local experts into the form that ``apply`` takes."""

    @abstractmethod
    def apply(
        self,
        x_TI: torch.Tensor,
        packed: Any,
        topk_weights_TA: torch.Tensor,
        topk_ids_TA: torch.Tensor,
        expert_map_X: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum over local experts only.

        Args:
            x_TI: Tokens.
            packed: From ``pack``.
            topk_weights_TA: float32 weights of outputs; they need not add up to 1.
            topk_ids_TA: int32 global expert ids, in no order; a token may name one twice.
            expert_map_X: int32 global id to local id, -1 where the expert is on another rank; None: all local.

        Returns:
            A new tensor like ``x_TI``; zeros for a token whose experts are all elsewhere.
        """
