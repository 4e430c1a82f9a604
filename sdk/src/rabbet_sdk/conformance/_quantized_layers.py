"""Layers with a quantisation method, built and loaded as the engine does it, with what they must compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rabbet.layers import (
    ColumnParallelLinear,
    FusedMoE,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from rabbet.weights import STANDARD_STACKS, WeightRules
from rabbet.weights.load import load_weights
from rabbet_sdk.fakes.ranks import SilentRanks, build_context
from rabbet_sdk.numerics import poison
from rabbet_sdk.oracles.quantization import QuantizedCheckpoint

__all__ = ["LAYERS", "PACKED", "Layers", "Stored", "held_bytes"]

LAYERS = ("replicated", "column", "row", "merged", "qkv")
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MODULES = {"merged": "gate_up_proj", "qkv": "qkv_proj"}
_HEADS, _KV_HEADS = 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A checkpoint of one layer.

    Attributes:
        tensors: Under their names in the checkpoint.
        dense: What they stand for, float64 [O, I], merged matrices one below the other.
        bias: [O], or None.
    """

    tensors: dict[str, torch.Tensor]
    dense: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Builds layers of one plugin.

    Attributes:
        plugin_class: The ``QuantizationConfig``.
        method: Its name.
        checkpoint: Its format.
        device: Where to build.
        generator: Source of weights.
    """

    plugin_class: Any
    method: str
    checkpoint: QuantizedCheckpoint
    device: torch.device
    generator: torch.Generator
    dtype: torch.dtype = torch.float32
    skip: Sequence[str] = field(default=())

    def config(self) -> Any:
        """The method with the settings of its checkpoint, and the model's merged layers."""
        config = self.plugin_class.from_config(self.checkpoint.settings(self.method, self.skip))
        config.packed_modules = PACKED
        return config

    def sizes(self, kind: str) -> tuple[int, tuple[int, ...]]:
        """Inputs, and outputs of each merged matrix: odd and uneven where the format allows it."""
        inner, outer = self.checkpoint.input_multiple, self.checkpoint.output_multiple
        inputs = 50 if inner == 1 else _up(50, 4 * inner)
        if kind == "qkv":
            head = _up(8, outer)
            return inputs, (_HEADS * head, _KV_HEADS * head, _KV_HEADS * head)
        outputs = (37, 22) if outer == 1 else (_up(37, 4 * outer), _up(22, 4 * outer) + 4 * outer)
        return inputs, outputs if kind == "merged" else outputs[:1]

    def store(self, kind: str, *, bias: bool = False, sizes: tuple[int, tuple[int, ...]] | None = None) -> Stored:
        """A random checkpoint: rows of sizes from 0.1 to 10, so that scales of neighbours cannot be mixed up."""
        inputs, outputs = sizes or self.sizes(kind)
        matrices = []
        for rows in outputs:
            matrix = torch.randn(rows, inputs, generator=self.generator)
            matrices.append(matrix * 10 ** (torch.rand(rows, 1, generator=self.generator) * 2 - 1))
        return self.store_dense(kind, matrices, bias=bias)

    def store_dense(self, kind: str, matrices: Sequence[torch.Tensor], *, bias: bool = False) -> Stored:
        """A checkpoint of given matrices."""
        tensors: dict[str, torch.Tensor] = {}
        dense, biases = [], []
        for name, matrix in zip(PACKED.get(_MODULES.get(kind, ""), ("proj",)), matrices, strict=True):
            packed = self.checkpoint.pack(matrix)
            tensors |= {f"model.{name}.{suffix}": tensor for suffix, tensor in packed.items()}
            dense.append(self.checkpoint.unpack(packed))
            if bias:
                biases.append(torch.randn(matrix.shape[0], generator=self.generator))
                tensors[f"model.{name}.bias"] = biases[-1]
        return Stored(tensors=tensors, dense=torch.cat(dense), bias=torch.cat(biases) if bias else None)

    def build(
        self,
        kind: str,
        *,
        rank: int = 0,
        size: int = 1,
        bias: bool = False,
        sizes: tuple[int, tuple[int, ...]] | None = None,
    ) -> nn.Module:
        """A model of one layer, ``layer_of`` it; its parameters hold what no checkpoint holds."""
        inputs, outputs = sizes or self.sizes(kind)
        name = _MODULES.get(kind, "proj")
        common: dict[str, Any] = {
            "context": build_context(
                SilentRanks(rank, size), dtype=self.dtype, device=self.device, quantization=self.config()
            ),
            "prefix": f"model.{name}",
            "bias": bias,
        }
        layer: LinearBase
        with torch.device(self.device):
            if kind == "qkv":
                layer = QKVParallelLinear(inputs, outputs[0] // _HEADS, _HEADS, _KV_HEADS, **common)
            elif kind == "merged":
                layer = MergedColumnParallelLinear(inputs, outputs, **common)
            else:
                classes: dict[str, Any] = {"column": ColumnParallelLinear, "row": RowParallelLinear}
                layer = classes.get(kind, ReplicatedLinear)(inputs, outputs[0], **common)
        root = nn.Module()
        root.model = nn.Module()
        root.model.add_module(name, layer)
        for parameter in layer.parameters():
            poison(parameter.data)
        return root

    def loaded(self, kind: str, stored: Stored, **options: Any) -> tuple[nn.Module, Any]:
        """Built and loaded: the model and its layer."""
        root = self.build(kind, bias=stored.bias is not None, **options)
        load(root, stored.tensors)
        return root, layer_of(root)

    def experts(self, num_experts: int, hidden: int, inner: int, *, rank: int = 0, size: int = 1) -> FusedMoE:
        """A layer of experts; its parameters hold what no checkpoint holds."""
        context = build_context(
            SilentRanks(rank, size), dtype=self.dtype, device=self.device, quantization=self.config()
        )
        with torch.device(self.device):
            layer = FusedMoE(
                num_experts=num_experts, top_k=2, hidden_size=hidden, intermediate_size=inner, context=context,
                prefix="model.experts",
            )  # fmt: skip
        for parameter in layer.parameters():
            poison(parameter.data)
        return layer

    def load_expert(self, layer: FusedMoE, expert: int, matrix: str, packed: Mapping[str, torch.Tensor]) -> None:
        """Hand one matrix of an expert to the loaders of its parameters."""
        for suffix, tensor in packed.items():
            name = self.checkpoint.expert_parameters[suffix][matrix == "down"]
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, tensor, (expert, matrix))

    def inputs(self, tokens: int, size: int) -> torch.Tensor:
        """[tokens, size] of the layers' type."""
        return torch.randn(tokens, size, generator=self.generator).to(self.device, self.dtype)

    def plain(self, x: torch.Tensor, stored: Stored) -> torch.Tensor:
        """The same, computed plainly in the layers' type."""
        bias = None if stored.bias is None else stored.bias.to(self.device, self.dtype)
        return self.checkpoint.plain(x, stored.dense.to(self.device, self.dtype), bias)


def load(root: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Through core's loader, which names what is missing, unexpected or of another shape."""
    load_weights(root, WeightRules(stacks=STANDARD_STACKS), tensors.items())


def layer_of(root: nn.Module) -> Any:
    """The layer of ``Layers.build``."""
    return next(module for module in root.modules() if isinstance(module, LinearBase))


def exact(x: torch.Tensor, stored: Stored) -> torch.Tensor:
    """``x @ dense.T + bias`` in float64."""
    out = x.cpu().double() @ stored.dense.T
    return out if stored.bias is None else out + stored.bias.double()


def held_bytes(layer: Any) -> int:
    """Bytes of all tensors that a layer and its method can reach, each storage once."""
    found: dict[int, int] = {}
    for tensor in _tensors((vars(layer), layer.quant_method), set()):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        value = getattr(value, "__dict__", {})
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, list | tuple | set):
        value = list(getattr(value, "__dict__", {}).values()) if _is_plugin_object(value) else []
    for item in value:
        yield from _tensors(item, seen)


def _is_plugin_object(value: Any) -> bool:
    return not isinstance(value, type | nn.Module) and type(value).__module__.partition(".")[0] not in (
        "builtins", "torch", "rabbet",
    )  # fmt: skip


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
