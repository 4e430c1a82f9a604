"""Weights in 8 bits, with one scale for each output channel; activations stay as they are.

In place of each matrix of a linear layer the checkpoint holds

    NAME.weight        int8 [O, I]
    NAME.weight_scale  float32 [O]      element [o, i] stands for weight[o, i] * weight_scale[o]

and its config.json says ``"quantization_config": {"quant_method": ..., "skip": ["lm_head"]}``; modules that ``skip``
names are dense. Embeddings, heads and the KV cache are dense always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rabbet.contracts import Refusal, register_quantization_config
from rabbet.contracts.quantization import FusedMoEMethod, LinearMethod, QuantizationConfig, QuantizationQuery
from rabbet.errors import ConfigError, WeightsError
from rabbet.layers import FusedMoE, LinearBase
from rabbet_sdk.strict import seal

__all__ = ["StrictQuantization"]

_DTYPES = ("float32", "bfloat16")


def _register(layer: nn.Module, name: str, zeros: torch.Tensor, loader: Callable[..., None], **axes: int) -> None:
    """A parameter with what the loader reads from it: where to go, and which axes are divided over ranks."""
    parameter = nn.Parameter(zeros, requires_grad=False)
    for key, value in {"weight_loader": loader, **axes}.items():
        setattr(parameter, key, value)
    layer.register_parameter(name, parameter)


def _dense(codes_OI: torch.Tensor, scale_O: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # In float32, rounded once: a scale in bfloat16 would cost as much as the 8 bits themselves.
    return (codes_OI.float() * scale_O.unsqueeze(-1)).to(dtype)


class _Int8Linear(LinearMethod):
    """Dequantises for each product and keeps nothing: the bytes of the checkpoint are all that is stored."""

    def create_weights(
        self,
        layer: Any,
        *,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
    ) -> None:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        codes = torch.zeros(rows, columns, dtype=torch.int8)
        _register(layer, "weight", codes, weight_loader, output_dim=0, input_dim=1)
        # No input_dim: each rank of a layer that is divided by inputs needs the scales of all rows.
        _register(layer, "weight_scale", torch.zeros(rows), weight_loader, output_dim=0)

    def apply(self, layer: Any, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x_TI, _dense(layer.weight, layer.weight_scale, x_TI.dtype), bias_O)


class _Int8Experts(FusedMoEMethod):
    """The same for experts: ``gate_up`` [X, 2I, N] and ``down`` [X, N, I], each with its scales."""

    def create_weights(
        self,
        layer: Any,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
    ) -> None:
        inner = intermediate_size_per_partition
        for name, rows, columns in (("gate_up", 2 * inner, hidden_size), ("down", hidden_size, inner)):
            _register(layer, name, torch.zeros(num_experts, rows, columns, dtype=torch.int8), weight_loader)
        _register(layer, "gate_up_scale", torch.zeros(num_experts, 2 * inner), weight_loader)
        _register(layer, "down_scale", torch.zeros(num_experts, hidden_size), self._load_whole)

    @staticmethod
    def _load_whole(parameter: nn.Parameter, tensor: torch.Tensor, shard_id: tuple[int, str]) -> None:
        # Rows of ``down`` are not divided over ranks, so neither are their scales.
        if tensor.shape != parameter.shape[1:]:
            raise WeightsError(f"scales of shape {tuple(tensor.shape)}; the layer needs {tuple(parameter.shape[1:])}")
        parameter.data[shard_id[0]].copy_(tensor)

    def apply(
        self, layer: Any, x_TI: torch.Tensor, topk_weights_TA: torch.Tensor, topk_ids_TA: torch.Tensor
    ) -> torch.Tensor:
        out_TI = torch.zeros_like(x_TI)
        for expert in sorted(set(topk_ids_TA.flatten().tolist())):
            rows, slots = torch.nonzero(topk_ids_TA == expert, as_tuple=True)
            gate_up = _dense(layer.gate_up[expert], layer.gate_up_scale[expert], x_TI.dtype)
            gate, up = F.linear(x_TI[rows], gate_up).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, _dense(layer.down[expert], layer.down_scale[expert], x_TI.dtype))
            out_TI.index_add_(0, rows, y * topk_weights_TA[rows, slots].unsqueeze(-1).to(y.dtype))
        return out_TI


@register_quantization_config("strict")
@seal
class StrictQuantization(QuantizationConfig):
    """The settings of one checkpoint."""

    @classmethod
    def supports(cls, query: QuantizationQuery) -> tuple[Refusal, ...]:
        """CPUs, and types that hold 8 bits exactly."""
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"runs on cpu, not on {query.device_type}"))
        if query.dtype not in _DTYPES:
            message = f"dtype is {query.dtype}; possible: {', '.join(_DTYPES)}"
            refusals.append(Refusal(code="DTYPE", message=message, fix=f"--dtype {_DTYPES[0]}"))
        return tuple(refusals)

    def __init__(self, skip: tuple[str, ...]) -> None:
        self.skip = skip

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StrictQuantization:
        """See ``QuantizationConfig``."""
        unknown = sorted(str(key) for key in config if key not in ("quant_method", "skip"))
        if unknown:
            field = f"quantization_config.{unknown[0]}"
            raise ConfigError(f"{field} is unknown; possible: quant_method, skip", field=field)
        skip = config.get("skip", [])
        if not isinstance(skip, list | tuple) or not all(isinstance(name, str) for name in skip):
            field = "quantization_config.skip"
            raise ConfigError(f"{field} must be a list of module names, not {type(skip).__name__}", field=field)
        return cls(tuple(skip))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | FusedMoEMethod | None:
        """Linear layers and experts, unless they are skipped."""
        if not isinstance(layer, LinearBase | FusedMoE):
            return None
        # The checkpoint's names of a merged layer: it can only be quantised, or dense, as a whole.
        parent, dot, last = prefix.rpartition(".")
        names = [f"{parent}{dot}{part}" for part in self.packed_modules.get(last, (last,))]
        skipped = [name for name in names if name in self.skip]
        if skipped and len(skipped) < len(names):
            others = ", ".join(name for name in names if name not in skipped)
            field = "quantization_config.skip"
            raise ConfigError(f"{field} names {skipped[0]}, but not {others}, which it is merged with", field=field)
        if skipped:
            return None
        return _Int8Linear() if isinstance(layer, LinearBase) else _Int8Experts()
