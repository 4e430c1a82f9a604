"""Plain torch forms of the small operations, of dense linear layers and of experts: the reference of every kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rabbet.contracts import Refusal, register_linear_backend, register_moe_backend
from rabbet.contracts.layer_ops import LayerOps
from rabbet.contracts.linear import LinearBackend, LinearQuery, MoEBackend, MoEQuery

__all__ = ["TorchLayerOps", "TorchLinearBackend", "TorchMoEBackend"]

_DTYPES = ("float32", "bfloat16", "float16")


class TorchLayerOps(LayerOps):
    """Each operation as its formula; statistics in float32."""

    def rms_norm(self, x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``LayerOps``."""
        x = x_TN.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return weight_N * x.to(x_TN.dtype)

    def add_rms_norm(
        self, x_TN: torch.Tensor, residual_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LayerOps``."""
        residual = x_TN + residual_TN
        return self.rms_norm(residual, weight_N, eps), residual

    def rotary(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        *,
        is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LayerOps``."""
        cos, sin = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q_THD, cos, sin, is_neox), _rotate(k_TKD, cos, sin, is_neox)

    def silu_and_mul(self, gate_up_T2N: torch.Tensor) -> torch.Tensor:
        """See ``LayerOps``."""
        gate, up = gate_up_T2N.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_and_mul(self, gate_up_T2N: torch.Tensor, *, approximate: str) -> torch.Tensor:
        """See ``LayerOps``."""
        gate, up = gate_up_T2N.chunk(2, dim=-1)
        return F.gelu(gate, approximate=approximate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    size = cos.shape[-1]
    rotated, rest = x[..., : 2 * size].float(), x[..., 2 * size :]
    if is_neox:
        first, second = rotated[..., :size], rotated[..., size:]
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((out.to(x.dtype), rest), dim=-1) if rest.shape[-1] else out.to(x.dtype)


def _dtype_refusals(dtype: str) -> tuple[Refusal, ...]:
    if dtype in _DTYPES:
        return ()
    return (Refusal(code="DTYPE", message=f"{dtype}; {', '.join(_DTYPES)} are supported", fix="--dtype float32"),)


@register_linear_backend("torch")
class TorchLinearBackend(LinearBackend):
    """``torch.nn.functional.linear`` on any device."""

    @classmethod
    def supports(cls, query: LinearQuery) -> tuple[Refusal, ...]:
        """Dense weights of the activations' type."""
        refusals = [*_dtype_refusals(query.dtype)]
        if query.weight_dtype != query.dtype:
            refusals.append(Refusal(code="WEIGHT_DTYPE", message=f"{query.weight_dtype} weights under {query.dtype}"))
        if query.scheme != "none":
            refusals.append(Refusal(code="SCHEME", message=f"dense weights only, not {query.scheme}"))
        return tuple(refusals)

    def pack(self, weight_OI: torch.Tensor) -> Any:
        """The weight itself."""
        return weight_OI

    def apply(self, x_TI: torch.Tensor, packed: Any, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """See ``LinearBackend``."""
        return F.linear(x_TI, packed, bias_O)


@register_moe_backend("torch")
class TorchMoEBackend(MoEBackend):
    """One pair of matrix products an expert that has tokens."""

    @classmethod
    def supports(cls, query: MoEQuery) -> tuple[Refusal, ...]:
        """Dense silu experts."""
        refusals = [*_dtype_refusals(query.dtype)]
        if query.scheme != "none":
            refusals.append(Refusal(code="SCHEME", message=f"dense experts only, not {query.scheme}"))
        if query.activation != "silu":
            refusals.append(Refusal(code="ACTIVATION", message=f"silu only, not {query.activation}"))
        return tuple(refusals)

    def pack(self, gate_up_X2NI: torch.Tensor, down_XIN: torch.Tensor) -> Any:
        """The weights themselves."""
        return gate_up_X2NI, down_XIN

    def apply(
        self,
        x_TI: torch.Tensor,
        packed: Any,
        topk_weights_TA: torch.Tensor,
        topk_ids_TA: torch.Tensor,
        expert_map_X: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``MoEBackend``."""
        gate_up, down = packed
        out = torch.zeros_like(x_TI)
        local_ids = topk_ids_TA.long() if expert_map_X is None else expert_map_X.long()[topk_ids_TA.long()]
        for expert in range(gate_up.shape[0]):
            rows, slots = torch.nonzero(local_ids == expert, as_tuple=True)
            if rows.numel() == 0:
                continue
            gate, up = F.linear(x_TI[rows], gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, rows, y * topk_weights_TA[rows, slots].unsqueeze(-1).to(y.dtype))
        return out
