"""The linear backend ``cpu``: compiled products over packed weights, torch where nothing was compiled.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rabbet.contracts import Refusal, register_linear_backend
from rabbet.contracts.linear import LinearBackend, LinearQuery
from rabbet_hw_cpu import native

if TYPE_CHECKING:
    import torch

__all__ = ["CpuLinear", "PackedWeight"]

_DEPTH = 32
"""Inputs of one product of matrix tiles."""
_GROUP = 16
"""Outputs that are computed together."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the order in which the kernel reads it.

    Attributes:
        data: The packed elements, 64-byte aligned by ``address``.
        address: First byte.
        num_outputs: O.
        num_inputs: I.
        dtype: Of the elements.
        type_code: The kernels' number of the dtype.
        is_tiled: Whether the order is that of matrix tiles.
    """

    data: torch.Tensor
    address: int
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    type_code: int
    is_tiled: bool


@register_linear_backend("cpu")
class CpuLinear(LinearBackend):
    """Dense matrix products on processor cores."""

    @classmethod
    def supports(cls, query: LinearQuery) -> tuple[Refusal, ...]:
        """Dense float32 and bfloat16, weights of the activations' type."""
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

    def pack(self, weight_OI: torch.Tensor) -> Any:
        """The weight in the kernel's order; the weight itself where torch multiplies it."""
        import torch

        kernels, code = native.library(), native.type_code(weight_OI.dtype)
        if kernels is None or code is None or weight_OI.dim() != 2 or weight_OI.numel() == 0:
            return weight_OI
        num_outputs, num_inputs = weight_OI.shape
        is_tiled = code == 1 and num_inputs % _DEPTH == 0 and native.has_amx()
        data = torch.empty(kernels.rabbet_packed_bytes(num_outputs, num_inputs, code, is_tiled) + 64, dtype=torch.uint8)
        address = (data.data_ptr() + 63) // 64 * 64
        weight_OI = weight_OI.contiguous()
        kernels.rabbet_pack(weight_OI.data_ptr(), address, num_outputs, num_inputs, code, is_tiled)
        return PackedWeight(data, address, num_outputs, num_inputs, weight_OI.dtype, code, is_tiled)

    def apply(self, x_TI: torch.Tensor, packed: Any, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """See ``LinearBackend``."""
        if not isinstance(packed, PackedWeight):
            from torch.nn.functional import linear

            return linear(x_TI, packed, bias_O)
        return _run(x_TI, packed, bias_O, packed.num_outputs, is_gated=False)

    def apply_gated_silu(self, x_TI: torch.Tensor, packed: Any) -> torch.Tensor | None:
        """See ``LinearBackend``; the product stays in float32 until the activation is done."""
        if not isinstance(packed, PackedWeight) or packed.num_outputs % (2 * _GROUP):
            return None
        return _run(x_TI, packed, None, packed.num_outputs // 2, is_gated=True)


def _run(
    x_TI: torch.Tensor, packed: PackedWeight, bias_O: torch.Tensor | None, width: int, *, is_gated: bool
) -> torch.Tensor:
    """The product, in the type of ``x_TI``."""
    kernels = native.library()
    assert kernels is not None
    if x_TI.shape[-1] != packed.num_inputs:
        raise ValueError(f"the layer takes {packed.num_inputs} inputs, not {x_TI.shape[-1]}")
    dtype = x_TI.dtype
    if dtype is not packed.dtype or not x_TI.is_contiguous():
        x_TI = x_TI.to(packed.dtype).contiguous()
    if bias_O is not None and (bias_O.dtype is not packed.dtype or not bias_O.is_contiguous()):
        bias_O = bias_O.to(packed.dtype).contiguous()
    out = x_TI.new_empty((*x_TI.shape[:-1], width))
    kernels.rabbet_linear(
        x_TI.data_ptr(), packed.address, None if bias_O is None else bias_O.data_ptr(), out.data_ptr(),
        x_TI.numel() // packed.num_inputs, packed.num_inputs, packed.num_outputs, is_gated, packed.type_code, packed.is_tiled,
    )  # fmt: skip
    return out if dtype is packed.dtype else out.to(dtype)
