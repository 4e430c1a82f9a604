"""Launches of the products of few rows, and the shapes of their tiles.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from rabbet_hw_cuda.launch import Kernel, is_dependent
from rabbet_hw_cuda.linear_kernels import few_kernel, one_kernel

__all__ = ["multiply"]

_one, _few = Kernel(one_kernel), Kernel(few_kernel)


def multiply(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, is_gated: bool
) -> None:
    """``out = x @ weight.T + bias``, or the gated form of ``LinearBackend.apply_gated_silu`` with half as many outputs."""
    rows, size = x_TI.shape
    outputs = out_TO.shape[1]
    bias = weight_OI if bias_O is None else bias_O
    if rows == 1:
        block, width, warps = one_shape(outputs, size, is_gated=is_gated)
        _one(
            (-(-outputs // block), 1, 1), x_TI, weight_OI, bias, out_TO, outputs, size, block, width,
            bias_O is not None, is_gated, is_dependent(x_TI), num_warps=warps,
        )  # fmt: skip
        return
    tile = max(16, 1 << (rows - 1).bit_length())
    block, width, warps, stages = few_shape(outputs, is_gated=is_gated)
    _few(
        (-(-outputs // block), 1, 1), x_TI, weight_OI, bias, out_TO, rows, outputs, x_TI.stride(0), size, tile, block, width,
        bias_O is not None, is_gated, is_dependent(x_TI), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def one_shape(outputs: int, inputs: int, *, is_gated: bool) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and warps. Measured: see the README."""
    width = min(2048, 1 << max(4, (inputs - 1).bit_length()))
    if width < 2048 or outputs >= 32768:
        return (2 if is_gated else 4), min(width, 1024), 4
    return 2, width, 8 if is_gated else 4


def few_shape(outputs: int, *, is_gated: bool) -> tuple[int, int, int, int]:
    """Outputs and inputs of a tile, warps and stages."""
    block = 16 if outputs < 8192 or is_gated else 32
    return block, 128, 4, 4
