"""A layer of gated experts: routing here, the products in the MoE backend or the quantisation method.

Shapes: T tokens, N hidden size, X experts, A experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rabbet.contracts.quantization import FusedMoEMethod
from rabbet.layers.context import BuildContext
from rabbet.layers.linear import dense_parameter, drop_unless_same, elements_ratio
from rabbet.layers.reference import TorchMoEBackend
from rabbet.layers.shards import copy_checked, even_part

__all__ = ["FusedMoE", "UnquantizedFusedMoEMethod"]


class UnquantizedFusedMoEMethod(FusedMoEMethod):
    """Dense experts through the MoE backend of the build context."""

    def create_weights(
        self,
        layer: nn.Module,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
    ) -> None:
        """``gate_up`` [X, 2I, N] and ``down`` [X, N, I]."""
        shapes = {
            "gate_up": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "down": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        assert isinstance(layer, FusedMoE)
        layer.gate_up = dense_parameter(layer, shapes["gate_up"], params_dtype, weight_loader)
        layer.down = dense_parameter(layer, shapes["down"], params_dtype, weight_loader)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack once a load; the dense forms are dropped where packing made others."""
        assert isinstance(layer, FusedMoE)
        if layer.packed is not None:
            return
        dense = (layer.gate_up, layer.down)
        layer.packed = layer.backend.pack(*(parameter.data for parameter in dense))
        parts = layer.packed if isinstance(layer.packed, tuple) else (layer.packed,)
        kept = {part.data_ptr() for part in parts if isinstance(part, torch.Tensor)}
        for parameter in dense:
            if parameter.data_ptr() not in kept:
                drop_unless_same(parameter, None)

    def apply(
        self, layer: nn.Module, x_TI: torch.Tensor, topk_weights_TA: torch.Tensor, topk_ids_TA: torch.Tensor
    ) -> torch.Tensor:
        """See ``FusedMoEMethod``."""
        assert isinstance(layer, FusedMoE)
        return layer.backend.apply(x_TI, layer.packed, topk_weights_TA, topk_ids_TA, None)


class FusedMoE(nn.Module):
    """Routed experts, each divided over ranks by its inner size.

    Checkpoint shards are loaded with ``shard_id`` ``(expert, "gate" | "up" | "down")``.
    """

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        context: BuildContext,
        prefix: str,
        renormalize: bool = True,
    ) -> None:
        """Create experts.

        Args:
            num_experts: X.
            top_k: A.
            hidden_size: N.
            intermediate_size: Inner size of an expert over all ranks.
            context: Build context.
            prefix: Name of the layer.
            renormalize: Whether the weights of the chosen experts are scaled to a sum of 1.
        """
        super().__init__()
        self.context = context
        self.prefix = prefix
        self.top_k = top_k
        self.renormalize = renormalize
        parallel = context.parallel
        self.inner_part = even_part(intermediate_size, rank=parallel.tp_rank, world_size=parallel.tp_size)
        self.backend = context.moe or TorchMoEBackend()
        self.packed: Any = None
        self.quant_method: FusedMoEMethod = (
            context.quant_method(self, prefix, FusedMoEMethod) or UnquantizedFusedMoEMethod()
        )
        self.quant_method.create_weights(
            self,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=self.inner_part.padded,
            params_dtype=context.dtype,
            weight_loader=self.load_shard,
        )

    def load_shard(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: tuple[int, str]) -> None:
        """Copy this rank's part of one expert's matrix, or of what belongs to it.

        Args:
            parameter: [X, ...]. Its attributes ``output_dim`` and ``input_dim`` name the axes of a matrix's outputs and
                inputs (1 and 2 where there are both), which may be shorter than the matrix: the ratio is kept (packed
                values, scales of groups). Ranks divide the outputs of gate and up and the inputs of down; without
                ``input_dim`` what belongs to down is whole on each rank. Without both: 1 and 2.
            tensor: The tensor over all ranks. One value (the scale of a whole matrix) fills [X] for down, and [X, 2] for
                gate and up.
            shard_id: The expert, and ``gate``, ``up`` or ``down``.

        Raises:
            WeightsError: If the tensor has another size than the layer.
        """
        expert, matrix = shard_id
        target, source, inner = parameter.data[expert], tensor, self.inner_part
        axes = {name: getattr(parameter, name, None) for name in ("output_dim", "input_dim")}
        if axes == {"output_dim": None, "input_dim": None}:
            axes = {"output_dim": 1, "input_dim": 2}
        axis = axes["input_dim" if matrix == "down" else "output_dim"]
        if tensor.numel() == 1 and target.dim() == (matrix != "down"):
            target, source = target if matrix == "down" else target[int(matrix == "up")], tensor.reshape(())
        elif axis is not None:
            ratio = elements_ratio(inner.padded * (1 if matrix == "down" else 2), target, axis - 1, self.prefix)
            if matrix != "down":
                rows = inner.padded // ratio
                target = target.narrow(axis - 1, 0 if matrix == "gate" else rows, rows)
            source = inner.take(source, axis - 1, ratio, self.prefix)
        copy_checked(target, source, self.prefix)

    def process_weights_after_loading(self) -> None:
        """Let the method repack what was loaded."""
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x_TN: torch.Tensor, router_logits_TX: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, over all ranks."""
        weights = torch.softmax(router_logits_TX.float(), dim=-1)
        topk_weights, topk_ids = torch.topk(weights, self.top_k, dim=-1)
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        out = self.quant_method.apply(self, x_TN, topk_weights, topk_ids.int())
        return self.context.parallel.all_reduce(out)
