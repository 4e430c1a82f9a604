"""Launches of the products of few rows, and the shapes of their tiles.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from rabbet_triton.launch import Kernel, dependence

from rabbet_hw_cuda.linear_kernels import few_kernel, one_kernel

__all__ = ["multiply"]

_MOST_PARTS = 264
"""Programs that split one product: twice the processors of the largest GPUs. More need no splits."""
_PARTIAL = _MOST_PARTS * 64 * 64 * 2
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
            bias_O is not None, is_gated, dependence(x_TI, is_small=True), num_warps=warps,
        )  # fmt: skip
        return
    tile = max(16, 1 << (rows - 1).bit_length())
    block, width, splits, warps, stages = few_shape(outputs, size)
    work = _workspace(x_TI.device)
    _few(
        (-(-outputs // block), splits, 1), x_TI, weight_OI, bias, out_TO, work.partial, work.counters,
        rows, outputs, x_TI.stride(0), size, tile, block, width, splits,
        bias_O is not None, is_gated, dependence(x_TI, is_small=False), num_warps=warps, num_stages=stages,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Where the parts of a product are added up; all products of a device share it, since they run one after another."""

    partial: torch.Tensor
    counters: torch.Tensor


@cache
def _workspace(device: torch.device) -> _Workspace:
    partial = torch.empty(_PARTIAL, dtype=torch.float32, device=device)
    return _Workspace(partial, torch.zeros(_MOST_PARTS, dtype=torch.int32, device=device))


def one_shape(outputs: int, inputs: int, *, is_gated: bool) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and warps. Measured: see the README."""
    width = min(2048, 1 << max(4, (inputs - 1).bit_length()))
    if width < 2048 or outputs >= 32768:
        return (2 if is_gated else 4), min(width, 1024), 4
    return 2, width, 8 if is_gated else 4


def few_shape(outputs: int, inputs: int) -> tuple[int, int, int, int, int]:
    """Outputs and inputs of a tile, splits, warps and stages. Measured: see the README."""
    width = 128 if inputs >= 128 else max(16, 1 << (inputs - 1).bit_length())
    parts = -(-outputs // 64)
    wanted = 1 if inputs <= 1024 or parts >= 96 else min(8, _MOST_PARTS // parts)
    return 64, width, 1 << (wanted.bit_length() - 1), 4, 4
