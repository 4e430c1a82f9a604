"""Dense linear layers in plain torch, with weights kept as [I, O].

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from rabbet.contracts import Refusal, register_linear_backend
from rabbet.contracts.linear import LinearBackend, LinearQuery
from rabbet_sdk.strict import seal

__all__ = ["StrictLinear"]


@register_linear_backend("strict")
@seal
class StrictLinear(LinearBackend):
    """Products in float32, rounded once."""

    @classmethod
    def supports(cls, query: LinearQuery) -> tuple[Refusal, ...]:
        """Refuse whatever would be computed wrongly, or not at all."""
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"runs on cpu, not on {query.device_type}"))
        if query.dtype not in ("float32", "bfloat16"):
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype}; float32 and bfloat16 are supported"))
        if query.weight_dtype != query.dtype:
            refusals.append(Refusal(code="WEIGHT_DTYPE", message=f"{query.weight_dtype} weights under {query.dtype}"))
        if query.scheme != "none":
            refusals.append(Refusal(code="SCHEME", message=f"dense weights only, not {query.scheme}"))
        return tuple(refusals)

    def pack(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """A copy in the order in which ``apply`` reads; the caller drops the original, so memory does not double."""
        return weight_OI.detach().T.contiguous()

    def apply(self, x_TI: torch.Tensor, packed: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """Sums need float32 whatever the types are: thousands of small terms would vanish beside a large bfloat16."""
        out_TO = x_TI.float() @ packed.float()
        if bias_O is not None:
            out_TO = out_TO + bias_O.float()
        return out_TO.to(x_TI.dtype)

    def apply_gated_silu(self, x_TI: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """The product stays in float32 until the activation is done: one rounding instead of three."""
        gate_TN, up_TN = (x_TI.float() @ packed.float()).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate_TN) * up_TN).to(x_TI.dtype)
