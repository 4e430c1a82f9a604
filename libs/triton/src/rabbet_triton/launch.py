"""What kernels in Triton share: Triton's interpreter, and launches that begin before the kernel in front has ended.

A kernel that is launched dependent (CUDA C++ Programming Guide, "Programmatic Dependent Launch") starts as the one in front
of it runs out, and waits with ``wait_for_inputs`` before it reads what others wrote or writes anything. Weights may be
read before: nothing writes them. Each kernel waits, so that its end means the end of all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

__all__ = ["IS_INTERPRETED", "Kernel", "dependence", "enter", "wait_for_inputs"]

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter keeps bfloat16 as bits, knows no launches, and multiplies in float32 only."""

_IS_HIP = torch.version.hip is not None
_FIRST_DEPENDENT = 9
"""Compute capability of the first GPUs that launch kernels so."""


@cache
def _has_dependent(device: int) -> bool:
    # AMD's GPUs have capabilities of 9 and more, and no such launches.
    return not _IS_HIP and torch.cuda.get_device_capability(device)[0] >= _FIRST_DEPENDENT


def dependence(x: torch.Tensor, *, is_small: bool) -> int:
    """The value of DEPENDENT for a launch on the device of ``x``: 0 where kernels follow one another only.

    Else 1: the next kernel may begin once the inputs of this one are there; 2, for kernels that leave most of the device
    idle (``is_small``): at once. A row of large ones that wait would take the room of the one that runs.
    """
    if IS_INTERPRETED.value or not _has_dependent(x.get_device()):
        return 0
    return 2 if is_small else 1


class Kernel:
    """A kernel whose launches, after the first, cost the host a tenth of Triton's own.

    Triton finds a compiled form by work on each argument that takes longer than many kernels run. Here the form is looked
    up by the same facts, told more briefly: constants, types, and what divides by 16 or is one.
    """

    def __init__(self, function: Any) -> None:
        """Keep the kernel; nothing is compiled."""
        self._function = function
        parameters = [] if IS_INTERPRETED.value else function.params
        self._kinds = [(parameter.is_constexpr, parameter.do_not_specialize) for parameter in parameters]
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: Sequence[int], *arguments: Any, num_warps: int, num_stages: int = 3, **options: int
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: Programs, three numbers.
            arguments: All of the kernel's, in order, constants among them. The last is DEPENDENT.
            num_warps: Warps a program.
            num_stages: Stages of pipelined loops.
            options: Others of Triton's compiler, the same in all launches of a kernel on a device.
        """
        if IS_INTERPRETED.value:
            self._function[tuple(grid)](*arguments)
            return
        key: list[Any] = [num_warps, num_stages, arguments[0].get_device()]
        for argument, (is_constant, is_any) in zip(arguments, self._kinds, strict=True):
            if is_constant:
                key.append(argument)
            elif isinstance(argument, torch.Tensor):
                key.append((argument.dtype, argument.data_ptr() % 16 == 0))
                if _IS_HIP:
                    # There offsets into what is smaller are compiled as 32 bits.
                    key.append(argument.untyped_storage().size() < 1 << 31)
            elif isinstance(argument, int) and not is_any:
                key.append(1 if argument == 1 else (argument % 16 == 0, argument.bit_length() > 31))
        fixed = tuple(key)
        compiled = self._compiled.get(fixed)
        if compiled is None:
            if arguments[-1]:
                options["launch_pdl"] = True
            self._compiled[fixed] = self._function[tuple(grid)](
                *arguments, num_warps=num_warps, num_stages=num_stages, **options
            )
        else:
            compiled[tuple(grid)](*arguments)


@triton.jit
def enter(DEPENDENT: tl.constexpr):
    """First of all, before what does not depend on the kernels in front."""
    if DEPENDENT == 2:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait until the kernels in front have ended, then let the one behind begin: it waits for this one in turn."""
    if DEPENDENT > 0:
        tl_cuda.gdc_wait()
    if DEPENDENT == 1:
        tl_cuda.gdc_launch_dependents()
