"""Linear layers that are divided over ranks, with the hook for quantisation methods.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rabbet.contracts.quantization import LinearMethod
from rabbet.errors import WeightsError
from rabbet.layers.attention import local_heads
from rabbet.layers.context import BuildContext

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "UnquantizedLinearMethod",
    "copy_checked",
]


def copy_checked(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy a shard into its place.

    Raises:
        WeightsError: If the shapes differ.
    """
    if target.shape != source.shape:
        raise WeightsError(
            f"{name} has a shard of shape {tuple(source.shape)}, but the model needs {tuple(target.shape)}", tensor=name
        )
    target.copy_(source)


class UnquantizedLinearMethod(LinearMethod):
    """Dense weights, multiplied by the linear backend of the build context.

    After loading the weight is packed. The dense form is dropped if packing made another one: the parameter is
    replaced by an empty one, and ``load_weights`` creates it anew for a second load.
    """

    def create_weights(
        self,
        layer: nn.Module,
        *,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
    ) -> None:
        """One parameter ``weight`` of shape [O, I]."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = nn.Parameter(torch.zeros(shape, dtype=params_dtype, device=layer.context.device), requires_grad=False)
        weight.output_dim, weight.input_dim = 0, 1  # type: ignore[attr-defined]
        weight.weight_loader = weight_loader  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)
        layer.packed = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack once."""
        if layer.packed is None:
            layer.packed = layer.context.linear.pack(layer.weight.data)
            if not (isinstance(layer.packed, torch.Tensor) and layer.packed.data_ptr() == layer.weight.data_ptr()):
                layer.weight.data = torch.empty(0, dtype=layer.weight.dtype, device=layer.weight.device)

    def apply(self, layer: nn.Module, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """See ``LinearMethod``."""
        return layer.context.linear.apply(x_TI, layer.packed, bias_O)  # type: ignore[no-any-return]


class LinearBase(nn.Module):
    """What all linear layers share: sizes, the method, and loading by shards."""

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        context: BuildContext,
        prefix: str,
        bias: bool = False,
        input_size_per_partition: int | None = None,
        output_partition_sizes: Sequence[int] | None = None,
    ) -> None:
        """Create parameters.

        Args:
            input_size: Inputs over all ranks.
            output_sizes: Outputs over all ranks, one entry for each merged matrix.
            context: Build context.
            prefix: Name of the layer in the model.
            bias: Whether there is a bias.
            input_size_per_partition: Inputs of this rank, if they are divided.
            output_partition_sizes: Outputs of this rank, if they are divided.
        """
        super().__init__()
        self.context = context
        self.prefix = prefix
        self.input_size = input_size
        self.output_sizes = tuple(output_sizes)
        self.output_partition_sizes = tuple(output_partition_sizes or output_sizes)
        method = context.quantization.get_quant_method(self, prefix) if context.quantization else None
        self.quant_method: LinearMethod = method if isinstance(method, LinearMethod) else UnquantizedLinearMethod()
        self.quant_method.create_weights(
            self,
            input_size_per_partition=input_size_per_partition or input_size,
            output_partition_sizes=self.output_partition_sizes,
            input_size=input_size,
            output_size=sum(output_sizes),
            params_dtype=context.dtype,
            weight_loader=self.load_shard,
        )
        if bias:
            self.bias = nn.Parameter(
                torch.zeros(sum(self.output_partition_sizes), dtype=context.dtype, device=context.device),
                requires_grad=False,
            )
            self.bias.output_dim = 0  # type: ignore[attr-defined]
            self.bias.weight_loader = self.load_shard  # type: ignore[attr-defined]
        else:
            self.register_parameter("bias", None)

    def process_weights_after_loading(self) -> None:
        """Let the method repack what was loaded."""
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` of this rank's part."""
        return self.quant_method.apply(self, x, self.bias)

    def load_shard(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        """Copy this rank's part of a checkpoint tensor into its place in the parameter."""
        axis = getattr(parameter, "output_dim", None)
        target = parameter.data
        if shard_id is not None and axis is not None:
            start, size = self._place(shard_id, getattr(parameter, "packed_factor", 1))
            target = target.narrow(axis, start, size)
        copy_checked(target, self._slice(parameter, tensor, shard_id), self.prefix)

    def _place(self, shard_id: Any, packed_factor: int) -> tuple[int, int]:
        """Start and size of one merged matrix in the parameter."""
        sizes = self.output_partition_sizes
        index = int(shard_id)
        return sum(sizes[:index]) // packed_factor, sizes[index] // packed_factor

    def _slice(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any) -> torch.Tensor:
        """This rank's part of the tensor; all of it where nothing is divided."""
        return tensor


class ReplicatedLinear(LinearBase):
    """The whole layer on each rank."""

    def __init__(
        self, input_size: int, output_size: int, *, context: BuildContext, prefix: str, bias: bool = False
    ) -> None:
        """As ``LinearBase``."""
        super().__init__(input_size, (output_size,), context=context, prefix=prefix, bias=bias)


class MergedColumnParallelLinear(LinearBase):
    """Several matrices with the same input, each divided by outputs; ``shard_id`` is the number of the matrix."""

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], *, context: BuildContext, prefix: str, bias: bool = False
    ) -> None:
        """As ``LinearBase``; outputs that do not divide are padded with zeros on the last rank."""
        world = context.parallel.tp_size
        super().__init__(
            input_size,
            output_sizes,
            context=context,
            prefix=prefix,
            bias=bias,
            output_partition_sizes=[-(-size // world) for size in output_sizes],
        )

    def _slice(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any) -> torch.Tensor:
        axis = getattr(parameter, "output_dim", None)
        if axis is None:
            return tensor
        size = self.output_partition_sizes[int(shard_id or 0)] // getattr(parameter, "packed_factor", 1)
        return take_part(tensor, axis, size, self.context.parallel.tp_rank)

    def forward_gated_silu(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of two merged matrices, in one kernel where the backend has one."""
        linear = self.context.linear
        if isinstance(self.quant_method, UnquantizedLinearMethod) and self.bias is None:
            fused = linear.apply_gated_silu(x, self.packed)
            if fused is not None:
                return fused
        return self.context.ops.silu_and_mul(self.forward(x))


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix, divided by outputs."""

    def __init__(
        self, input_size: int, output_size: int, *, context: BuildContext, prefix: str, bias: bool = False
    ) -> None:
        """As ``LinearBase``."""
        super().__init__(input_size, (output_size,), context=context, prefix=prefix, bias=bias)


class RowParallelLinear(LinearBase):
    """One matrix, divided by inputs; the results of all ranks are summed.

    ``input_part`` is what a rank gets where the inputs are heads: see ``LocalHeads``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        context: BuildContext,
        prefix: str,
        bias: bool = False,
        input_part: tuple[int, int, int] | None = None,
    ) -> None:
        """As ``LinearBase``.

        Args:
            input_size: Inputs over all ranks.
            output_size: Outputs.
            context: Build context.
            prefix: Name of the layer.
            bias: Whether there is a bias; only rank 0 adds it.
            input_part: First input of this rank, how many there are, and how many the layer has with padding.
        """
        world = context.parallel.tp_size
        if input_part is None:
            size = -(-input_size // world)
            first = min(size * context.parallel.tp_rank, input_size)
            input_part = (first, max(0, min(size, input_size - first)), size)
        self.input_part = input_part
        super().__init__(
            input_size, (output_size,), context=context, prefix=prefix, bias=bias, input_size_per_partition=input_part[2]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        parallel = self.context.parallel
        out = self.quant_method.apply(self, x, self.bias if parallel.tp_rank == 0 else None)
        return parallel.all_reduce(out)

    def _slice(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any) -> torch.Tensor:
        axis = getattr(parameter, "input_dim", None)
        if axis is None or tensor.dim() <= axis:
            return tensor
        first, real, padded = self.input_part
        factor = self.input_size // tensor.shape[axis] if tensor.shape[axis] else 1
        part = tensor.narrow(axis, first // factor, real // factor)
        return pad_axis(part, axis, padded // factor)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections in one matrix, divided by heads; ``shard_id`` is ``q``, ``k`` or ``v``."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        context: BuildContext,
        prefix: str,
        bias: bool = False,
    ) -> None:
        """As ``LinearBase``; numbers of heads are those of the model."""
        parallel = context.parallel
        self.heads = local_heads(num_heads, num_kv_heads, rank=parallel.tp_rank, world_size=parallel.tp_size)
        self.head_dim = head_dim
        self.total_num_heads, self.total_num_kv_heads = num_heads, num_kv_heads
        kv_size = self.heads.num_kv_heads * head_dim
        super().__init__(
            hidden_size,
            (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim),
            context=context,
            prefix=prefix,
            bias=bias,
            output_partition_sizes=(self.heads.num_heads * head_dim, kv_size, kv_size),
        )

    @property
    def output_part(self) -> tuple[int, int, int]:
        """``RowParallelLinear.input_part`` of the output projection that follows."""
        first, real = self._query_rows()
        return first * self.head_dim, real * self.head_dim, self.heads.num_heads * self.head_dim

    def _query_rows(self) -> tuple[int, int]:
        """First query head of this rank, and how many the model has."""
        heads, parallel = self.heads, self.context.parallel
        group = self.total_num_heads // self.total_num_kv_heads
        if self.total_num_kv_heads >= parallel.tp_size:
            return heads.first_kv_head * group, heads.num_real_kv_heads * group
        return parallel.tp_rank * heads.num_heads, heads.num_heads

    def _place(self, shard_id: Any, packed_factor: int) -> tuple[int, int]:
        return super()._place("qkv".index(shard_id), packed_factor)

    def _slice(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any) -> torch.Tensor:
        axis = getattr(parameter, "output_dim", None)
        if axis is None:
            return tensor
        if shard_id == "q":
            first, real = self._query_rows()
            padded, total = self.heads.num_heads, self.total_num_heads
        else:
            first, real = self.heads.first_kv_head, self.heads.num_real_kv_heads
            padded, total = self.heads.num_kv_heads, self.total_num_kv_heads
        if tensor.shape[axis] % total:
            raise WeightsError(
                f"{self.prefix} ({shard_id}) has {tensor.shape[axis]} rows, which do not divide over {total} heads",
                tensor=self.prefix,
            )
        rows = tensor.shape[axis] // total
        return pad_axis(tensor.narrow(axis, first * rows, real * rows), axis, padded * rows)


def take_part(tensor: torch.Tensor, axis: int, size: int, rank: int) -> torch.Tensor:
    """Part ``rank`` of equal parts of ``size``; the last ones are filled up with zeros."""
    first = min(size * rank, tensor.shape[axis])
    return pad_axis(tensor.narrow(axis, first, min(size, tensor.shape[axis] - first)), axis, size)


def pad_axis(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The tensor with zeros behind it up to ``size`` along ``axis``."""
    missing = size - tensor.shape[axis]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=axis)
