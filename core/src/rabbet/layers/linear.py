"""Linear layers that are divided over ranks, with the hook for quantisation methods.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rabbet.contracts.quantization import LinearMethod
from rabbet.errors import WeightsError
from rabbet.layers.attention import local_heads
from rabbet.layers.context import BuildContext
from rabbet.layers.shards import Part, copy_checked, even_part, whole_part

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "UnquantizedLinearMethod",
]


def is_same_memory(packed: Any, weight: torch.Tensor) -> bool:
    """Whether packing a weight gave the weight itself, so that dropping it would gain nothing."""
    return isinstance(packed, torch.Tensor) and packed.data_ptr() == weight.data_ptr()


class UnquantizedLinearMethod(LinearMethod):
    """Dense weights, multiplied by the linear backend of the build context.

    After loading the weight is packed, and the dense form is dropped where packing made another one: the parameter
    stays, without elements. A second load makes it anew and packs again.
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
        weight_loader: Callable[..., None],
    ) -> None:
        """One parameter ``weight`` of shape [O, I]."""
        assert isinstance(layer, LinearBase)
        shape = (sum(output_partition_sizes), input_size_per_partition)
        layer.weight = dense_parameter(layer, shape, params_dtype, weight_loader)
        layer.weight.output_dim, layer.weight.input_dim = 0, 1  # type: ignore[attr-defined]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack once a load."""
        assert isinstance(layer, LinearBase)
        if layer.packed is None:
            layer.packed = layer.context.linear.pack(layer.weight.data)
            drop_unless_same(layer.weight, layer.packed)

    def apply(self, layer: Any, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """See ``LinearMethod``."""
        return layer.context.linear.apply(x_TI, layer.packed, bias_O)  # type: ignore[no-any-return]


def dense_parameter(
    layer: Any, shape: tuple[int, ...], dtype: torch.dtype, weight_loader: Callable[..., None]
) -> nn.Parameter:
    """A parameter of zeros whose loader undoes an earlier packing: ``layer.packed`` is cleared."""
    device = layer.context.device
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

    def load(target: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        if target.numel() == 0:
            target.data = torch.zeros(shape, dtype=dtype, device=device)
        layer.packed = None
        weight_loader(target, tensor, shard_id)

    parameter.weight_loader = load  # type: ignore[attr-defined]
    return parameter


def drop_unless_same(parameter: nn.Parameter, packed: Any) -> None:
    """Free the dense form of a packed weight."""
    if not is_same_memory(packed, parameter.data):
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


class LinearBase(nn.Module):
    """What all linear layers share: sizes, the method, and loading by shards."""

    weight: nn.Parameter

    def __init__(
        self,
        input_part: Part,
        output_parts: Sequence[Part],
        *,
        context: BuildContext,
        prefix: str,
        bias: bool = False,
    ) -> None:
        """Create parameters.

        Args:
            input_part: Inputs of this rank.
            output_parts: Outputs of this rank, one entry for each merged matrix.
            context: Build context.
            prefix: Name of the layer in the model.
            bias: Whether there is a bias.
        """
        super().__init__()
        self.context = context
        self.prefix = prefix
        self.input_part = input_part
        self.output_parts = tuple(output_parts)
        self.input_size = input_part.total
        self.output_sizes = tuple(part.total for part in output_parts)
        self.output_partition_sizes = tuple(part.padded for part in output_parts)
        self.packed: Any = None
        method: LinearMethod | None = context.quant_method(self, prefix, LinearMethod)
        self.quant_method = method or UnquantizedLinearMethod()
        self.quant_method.create_weights(
            self,
            input_size_per_partition=input_part.padded,
            output_partition_sizes=self.output_partition_sizes,
            input_size=self.input_size,
            output_size=sum(self.output_sizes),
            params_dtype=context.dtype,
            weight_loader=self.load_shard,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            zeros = torch.zeros(sum(self.output_partition_sizes), dtype=context.dtype, device=context.device)
            self.bias = nn.Parameter(zeros, requires_grad=False)
            self.bias.output_dim = 0  # type: ignore[attr-defined]
            self.bias.weight_loader = self.load_shard  # type: ignore[attr-defined]

    def process_weights_after_loading(self) -> None:
        """Let the method repack what was loaded."""
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` of this rank's part."""
        return self.quant_method.apply(self, x, self.bias)

    def load_shard(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        """Copy this rank's part of a checkpoint tensor into its place in the parameter.

        Args:
            parameter: Its attributes ``output_dim`` and ``input_dim`` name the axes that are divided. An axis may
                have fewer elements than the layer has rows (packed values, scales of groups): the ratio is kept.
            tensor: The tensor over all ranks.
            shard_id: Which of the merged matrices it is; None: all of them, in order.

        Raises:
            WeightsError: If the tensor has another size than the layer.
        """
        axis = getattr(parameter, "output_dim", None)
        if shard_id is None and axis is not None and len(self.output_parts) > 1:
            self._load_merged(parameter, tensor, axis)
            return
        target, source = parameter.data, tensor
        if axis is not None:
            index = self._index(shard_id)
            ratio = elements_ratio(sum(self.output_partition_sizes), target, axis, self.prefix)
            start = sum(self.output_partition_sizes[:index]) // ratio
            target = target.narrow(axis, start, self.output_partition_sizes[index] // ratio)
            source = self.output_parts[index].take(source, axis, ratio, self.prefix)
        input_axis = getattr(parameter, "input_dim", None)
        if input_axis is not None:
            ratio = elements_ratio(self.input_part.padded, target, input_axis, self.prefix)
            source = self.input_part.take(source, input_axis, ratio, self.prefix)
        copy_checked(target, source, self.prefix)

    def _load_merged(self, parameter: nn.Parameter, tensor: torch.Tensor, axis: int) -> None:
        """Load a tensor that the checkpoint holds merged already."""
        ratio = elements_ratio(sum(self.output_partition_sizes), parameter.data, axis, self.prefix)
        if tensor.dim() <= axis or tensor.shape[axis] * ratio != sum(self.output_sizes):
            needed = sum(self.output_sizes) // ratio
            raise WeightsError(
                f"{self.prefix} has the shape {tuple(tensor.shape)}, but the model needs {needed} on axis {axis}",
                tensor=self.prefix,
            )
        pieces = torch.split(tensor, [size // ratio for size in self.output_sizes], dim=axis)
        for shard_id, piece in zip(self._shard_ids(), pieces, strict=True):
            self.load_shard(parameter, piece, shard_id)

    def _shard_ids(self) -> tuple[Any, ...]:
        """The ids of the merged matrices, in order."""
        return tuple(range(len(self.output_parts)))

    def _index(self, shard_id: Any) -> int:
        """Number of a merged matrix."""
        return 0 if shard_id is None else self._shard_ids().index(shard_id)


def elements_ratio(size: int, tensor: torch.Tensor, axis: int, name: str) -> int:
    """Rows of the layer that one element of a parameter stands for."""
    length = tensor.shape[axis]
    if length == 0 or size % length:
        raise WeightsError(f"{name}: {length} elements cannot stand for {size} rows", tensor=name)
    return size // length


class ReplicatedLinear(LinearBase):
    """The whole layer on each rank."""

    def __init__(
        self, input_size: int, output_size: int, *, context: BuildContext, prefix: str, bias: bool = False
    ) -> None:
        """As ``LinearBase``."""
        super().__init__(whole_part(input_size), (whole_part(output_size),), context=context, prefix=prefix, bias=bias)


class MergedColumnParallelLinear(LinearBase):
    """Several matrices with the same input, each divided by outputs; ``shard_id`` is the number of the matrix."""

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], *, context: BuildContext, prefix: str, bias: bool = False
    ) -> None:
        """As ``LinearBase``; outputs that do not divide are padded with zeros on the last ranks."""
        parallel = context.parallel
        parts = [even_part(size, rank=parallel.tp_rank, world_size=parallel.tp_size) for size in output_sizes]
        super().__init__(whole_part(input_size), parts, context=context, prefix=prefix, bias=bias)

    def forward_gated_silu(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of two merged matrices, in one kernel where the backend has one."""
        context = self.context
        if self.bias is None and type(self.quant_method) is UnquantizedLinearMethod:
            fused = context.linear.apply_gated_silu(x, self.packed)
            if fused is not None:
                return fused
        return context.ops.silu_and_mul(self.quant_method.apply(self, x, self.bias))


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix, divided by outputs."""

    def __init__(
        self, input_size: int, output_size: int, *, context: BuildContext, prefix: str, bias: bool = False
    ) -> None:
        """As ``LinearBase``."""
        super().__init__(input_size, (output_size,), context=context, prefix=prefix, bias=bias)


class RowParallelLinear(LinearBase):
    """One matrix, divided by inputs; the results of all ranks are summed."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        context: BuildContext,
        prefix: str,
        bias: bool = False,
        input_part: Part | None = None,
    ) -> None:
        """As ``LinearBase``.

        Args:
            input_size: Inputs over all ranks.
            output_size: Outputs.
            context: Build context.
            prefix: Name of the layer.
            bias: Whether there is a bias; only rank 0 adds it.
            input_part: The inputs of this rank where they are heads: ``QKVParallelLinear.output_part``.
        """
        parallel = context.parallel
        if input_part is None:
            input_part = even_part(input_size, rank=parallel.tp_rank, world_size=parallel.tp_size)
        super().__init__(input_part, (whole_part(output_size),), context=context, prefix=prefix, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        parallel = self.context.parallel
        out = self.quant_method.apply(self, x, self.bias if parallel.tp_rank == 0 else None)
        return out if parallel.tp_size == 1 else parallel.all_reduce(out)


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
        heads = local_heads(num_heads, num_kv_heads, rank=parallel.tp_rank, world_size=parallel.tp_size)
        q_part = Part(
            first=heads.first_head * head_dim,
            size=heads.num_real_heads * head_dim,
            padded=heads.num_heads * head_dim,
            total=num_heads * head_dim,
        )
        kv_part = Part(
            first=heads.first_kv_head * head_dim,
            size=heads.num_real_kv_heads * head_dim,
            padded=heads.num_kv_heads * head_dim,
            total=num_kv_heads * head_dim,
        )
        super().__init__(whole_part(hidden_size), (q_part, kv_part, kv_part), context=context, prefix=prefix, bias=bias)
        self.heads = heads
        self.head_dim = head_dim

    @property
    def output_part(self) -> Part:
        """``RowParallelLinear.input_part`` of the output projection that follows."""
        return self.output_parts[0]

    def _shard_ids(self) -> tuple[Any, ...]:
        return ("q", "k", "v")
