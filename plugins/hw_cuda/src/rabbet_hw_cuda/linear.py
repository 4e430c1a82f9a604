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
_MOST_ROWS = 16
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
    import torch
    import triton

    from rabbet_hw_cuda.launch import dependent
    from rabbet_hw_cuda.linear_kernels import few_kernel, one_kernel

    size = x_TI.shape[-1]
    rows = x_TI.numel() // size
    flat = x_TI.reshape(rows, size)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    outputs = weight_OI.shape[0] // (2 if is_gated else 1)
    out = torch.empty((*x_TI.shape[:-1], outputs), dtype=x_TI.dtype, device=x_TI.device)
    bias = weight_OI if bias_O is None else bias_O
    shared = {"HAS_BIAS": bias_O is not None, "IS_GATED": is_gated, **dependent(x_TI)}
    if rows == 1:
        block, width, warps = _one_shape(outputs, size, is_gated=is_gated)
        one_kernel[(triton.cdiv(outputs, block),)](
            flat, weight_OI, bias, out, outputs, size, block, width, **shared, num_warps=warps
        )
    else:
        tile = max(16, triton.next_power_of_2(rows))
        block, width, warps, stages = _few_shape(outputs, is_gated=is_gated)
        few_kernel[(triton.cdiv(outputs, block), 1)](
            flat, weight_OI, bias, out, rows, outputs, flat.stride(0), size, tile, block, width, **shared,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def _one_shape(outputs: int, inputs: int, *, is_gated: bool) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and warps."""
    width = 1024 if inputs >= 1024 else 1 << max(4, (inputs - 1).bit_length())
    block = 4 if outputs < 32768 else 8
    return (block // 2 if is_gated else block), width, 4


def _few_shape(outputs: int, *, is_gated: bool) -> tuple[int, int, int, int]:
    """Outputs and inputs of a tile, warps and stages."""
    block = 16 if outputs < 8192 or is_gated else 32
    return block, 128, 4, 4
