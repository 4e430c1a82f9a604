"""The linear backend ``cuda``: few rows by kernels that read the matrix once, many rows by cuBLAS.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rabbet.contracts import Refusal, register_linear_backend
from rabbet.contracts.linear import LinearBackend, LinearQuery

if TYPE_CHECKING:
    import torch

__all__ = ["CudaLinear"]

_DTYPES = ("float32", "bfloat16", "float16")
_MOST_ROWS = 32
"""Rows up to which the kernels here are used."""


@register_linear_backend("cuda")
class CudaLinear(LinearBackend):
    """Dense products on one GPU."""

    @classmethod
    def supports(cls, query: LinearQuery) -> tuple[Refusal, ...]:
        """Dense weights of the activations' type."""
        refusals = []
        if query.device_type != "cuda":
            refusals.append(Refusal(code="DEVICE", message=f"runs on cuda, not on {query.device_type}"))
        if query.arch.startswith("gfx"):
            refusals.append(Refusal(code="ARCH", message=f"tiles are those of NVIDIA's GPUs, not of {query.arch}"))
        if query.dtype not in _DTYPES:
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype}; {', '.join(_DTYPES)} are supported"))
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
        if not _is_few(x_TI, packed):
            from torch.nn.functional import linear

            return linear(x_TI, packed, bias_O)
        return _few(x_TI, packed, bias_O, is_gated=False)

    def apply_gated_silu(self, x_TI: torch.Tensor, packed: Any) -> torch.Tensor | None:
        """See ``LinearBackend``; few rows only."""
        if not _is_few(x_TI, packed) or packed.shape[0] % 2:
            return None
        return _few(x_TI, packed, None, is_gated=True)


def _is_few(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether the kernels here take it; float32 is left to cuBLAS, and checks of shapes to torch."""
    size = x_TI.shape[-1]
    return (
        x_TI.element_size() == 2
        and 0 < x_TI.numel() <= _MOST_ROWS * size
        and x_TI.dtype is weight_OI.dtype
        and weight_OI.dim() == 2
        and size == weight_OI.shape[1]
        and weight_OI.is_contiguous()
    )


def _few(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, is_gated: bool) -> torch.Tensor:
    from rabbet_hw_cuda.few_rows import multiply

    size = x_TI.shape[-1]
    flat = x_TI.reshape(-1, size)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    outputs = weight_OI.shape[0] // (2 if is_gated else 1)
    out = x_TI.new_empty((*x_TI.shape[:-1], outputs))
    multiply(flat, weight_OI, bias_O, out.view(-1, outputs), is_gated=is_gated)
    return out
