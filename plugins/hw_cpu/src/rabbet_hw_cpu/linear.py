"""The linear backend ``cpu``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rabbet.contracts import Refusal, register_linear_backend
from rabbet.contracts.linear import LinearBackend, LinearQuery

__all__ = ["CpuLinear"]


@register_linear_backend("cpu")
class CpuLinear(LinearBackend):
    """Dense matrix products on processor cores."""

    @classmethod
    def supports(cls, query: LinearQuery) -> tuple[Refusal, ...]:
        """Dense float32 and bfloat16."""
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"runs on cpu, not on {query.device_type}"))
        if query.dtype not in ("float32", "bfloat16"):
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype}; float32 and bfloat16 are supported"))
        if query.scheme != "none":
            refusals.append(Refusal(code="SCHEME", message=f"dense weights only, not {query.scheme}"))
        return tuple(refusals)

    def pack(self, weight_OI: torch.Tensor) -> Any:
        """The weight itself."""
        return weight_OI

    def apply(self, x_TI: torch.Tensor, packed: Any, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """See ``LinearBackend``."""
        return F.linear(x_TI, packed, bias_O)
