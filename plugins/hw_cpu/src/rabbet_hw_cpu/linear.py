"""The linear backend ``cpu``: bfloat16 on matrix tiles where the processor has them, torch otherwise.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rabbet.contracts import Refusal, register_linear_backend
from rabbet.contracts.linear import LinearBackend, LinearQuery
from rabbet_hw_cpu import native

__all__ = ["CpuLinear", "PackedWeight"]

_DEPTH = 32
"""Inputs of one tile product; other sizes go to torch."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the order in which the tiles are read.

    Attributes:
        data: The packed elements, 64-byte aligned by ``address``.
        address: First byte.
        num_outputs: O.
        num_inputs: I.
    """

    data: torch.Tensor
    address: int
    num_outputs: int
    num_inputs: int


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
        """Tiles for bfloat16 weights whose inputs are a multiple of 32; the weight itself otherwise."""
        num_outputs, num_inputs = weight_OI.shape
        if weight_OI.dtype is not torch.bfloat16 or num_inputs % _DEPTH or not native.has_amx():
            return weight_OI
        kernels = native.library()
        assert kernels is not None
        size = kernels.rabbet_packed_bytes(num_outputs, num_inputs)
        data = torch.empty(size + 64, dtype=torch.uint8)
        address = (data.data_ptr() + 63) // 64 * 64
        kernels.rabbet_pack(weight_OI.contiguous().data_ptr(), address, num_outputs, num_inputs)
        return PackedWeight(data, address, num_outputs, num_inputs)

    def apply(self, x_TI: torch.Tensor, packed: Any, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """See ``LinearBackend``."""
        if not isinstance(packed, PackedWeight):
            return F.linear(x_TI, packed, bias_O)
        return self._run(x_TI, packed, bias_O, packed.num_outputs, is_gated=False)

    def apply_gated_silu(self, x_TI: torch.Tensor, packed: Any) -> torch.Tensor | None:
        """See ``LinearBackend``; the product stays in float32 until the activation is done."""
        if not isinstance(packed, PackedWeight) or packed.num_outputs % _DEPTH:
            return None
        return self._run(x_TI, packed, None, packed.num_outputs // 2, is_gated=True)

    @staticmethod
    def _run(
        x_TI: torch.Tensor, packed: PackedWeight, bias_O: torch.Tensor | None, width: int, *, is_gated: bool
    ) -> torch.Tensor:
        kernels = native.library()
        assert kernels is not None
        x_TI = x_TI.contiguous()
        out = torch.empty((*x_TI.shape[:-1], width), dtype=torch.bfloat16)
        kernels.rabbet_linear(
            x_TI.data_ptr(),
            packed.address,
            None if bias_O is None else bias_O.data_ptr(),
            out.data_ptr(),
            x_TI.numel() // packed.num_inputs,
            packed.num_inputs,
            packed.num_outputs,
            int(is_gated),
        )
        return out
