"""What all kernels here share: Triton's interpreter, and launches that begin before the kernel in front has ended.

A kernel that is launched dependent (CUDA C++ Programming Guide, "Programmatic Dependent Launch") starts as the one in front
of it runs out, and waits with ``wait_for_inputs`` before it reads what others wrote or writes anything. Weights may be
read before: nothing writes them. Each kernel waits, so that its end means the end of all before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

__all__ = ["IS_INTERPRETED", "dependent", "let_next_begin", "wait_for_inputs"]

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter keeps bfloat16 as bits, knows no launches, and multiplies in float32 only."""

_FIRST_DEPENDENT = 9
"""Compute capability of the first GPUs that launch kernels so."""


@cache
def _has_dependent(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _FIRST_DEPENDENT


def dependent(x: torch.Tensor) -> dict[str, Any]:
    """Options of a launch on the device of ``x``: ``DEPENDENT`` for the kernel, ``launch_pdl`` for Triton."""
    if IS_INTERPRETED.value or not _has_dependent(x.get_device()):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait until the kernels in front have ended."""
    if DEPENDENT:
        tl_cuda.gdc_wait()


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """The kernel behind may start; it waits for this one's end before it reads."""
    if DEPENDENT:
        tl_cuda.gdc_launch_dependents()
