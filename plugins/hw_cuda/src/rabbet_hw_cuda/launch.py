"""What all kernels here share: Triton's interpreter, and launches that begin before the kernel in front has ended.

A kernel that is launched dependent (CUDA C++ Programming Guide, "Programmatic Dependent Launch") starts as the one in front
of it runs out, and waits with ``wait_for_inputs`` before it reads what others wrote or writes anything. Weights may be
read before: nothing writes them. Each kernel waits, so that its end means the end of all before it, and lets the next begin
only then: kernels that wait in a row would take the room of the one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

__all__ = ["IS_INTERPRETED", "Kernel", "is_dependent", "let_next_begin", "wait_for_inputs"]

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter keeps bfloat16 as bits, knows no launches, and multiplies in float32 only."""

_FIRST_DEPENDENT = 9
"""Compute capability of the first GPUs that launch kernels so."""


@cache
def _has_dependent(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _FIRST_DEPENDENT


def is_dependent(x: torch.Tensor) -> bool:
    """Whether kernels on the device of ``x`` may be launched dependent: the value of DEPENDENT."""
    return not IS_INTERPRETED.value and _has_dependent(x.get_device())


class Kernel:
    """A kernel whose launches, after the first, cost the host a tenth of Triton's own.

    Triton finds a compiled form by work on each argument that takes longer than many kernels run. Here the form is looked
    up by the same facts, told more briefly: constants, types, and what divides by 16 or is one.
    """

    def __init__(self, function: Any) -> None:
        """Keep the kernel; nothing is compiled."""
        self._function = function
        self._is_constant = [parameter.is_constexpr for parameter in function.params] if not IS_INTERPRETED.value else []
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: Sequence[int], *arguments: Any, num_warps: int, num_stages: int = 3) -> None:
        """Launch on the current stream.

        Args:
            grid: Programs, three numbers.
            arguments: All of the kernel's, in order, constants among them. The last is DEPENDENT.
            num_warps: Warps a program.
            num_stages: Stages of pipelined loops.
        """
        if IS_INTERPRETED.value:
            self._function[tuple(grid)](*arguments)
            return
        key: list[Any] = [num_warps, num_stages, arguments[0].get_device()]
        for argument, is_constant in zip(arguments, self._is_constant, strict=True):
            if is_constant:
                key.append(argument)
            elif isinstance(argument, torch.Tensor):
                key.append((argument.dtype, argument.data_ptr() % 16 == 0))
            elif isinstance(argument, int):
                key.append(1 if argument == 1 else (argument % 16 == 0, argument.bit_length() > 31))
        fixed = tuple(key)
        compiled = self._compiled.get(fixed)
        if compiled is None:
            options = {"launch_pdl": True} if arguments[-1] else {}
            self._compiled[fixed] = self._function[tuple(grid)](
                *arguments, num_warps=num_warps, num_stages=num_stages, **options
            )
        else:
            compiled[tuple(grid)](*arguments)


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
