"""Shards of linear layers, added or joined, are the whole layer; packed weights and foreign methods load likewise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rabbet.contracts.quantization import LinearMethod, QuantizationConfig
from rabbet.errors import ConfigError, WeightsError
from rabbet.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    local_heads,
)
from rabbet.layers.reference import TorchLinearBackend

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def load(layer: Any, name: str, tensor: torch.Tensor, shard_id: Any = None) -> None:
    parameter = getattr(layer, name)
    parameter.weight_loader(parameter, tensor, shard_id)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 11])
def test_column_shards_joined_are_the_whole(context: Any, size: int) -> None:
    weight, bias = matrix(10, 12), torch.randn(10)
    parts = []
    for rank in range(size):
        layer = ColumnParallelLinear(12, 10, context=context(rank, size), prefix="p", bias=True)
        load(layer, "weight", weight)
        load(layer, "bias", bias)
        layer.process_weights_after_loading()
        parts.append(layer(X))
    assert len({part.shape for part in parts}) == 1
    torch.testing.assert_close(torch.cat(parts, dim=-1)[:, :10], X @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 13])
def test_row_shards_added_are_the_whole_with_one_bias(context: Any, size: int) -> None:
    weight, bias = matrix(7, 12), torch.randn(7)
    total = torch.zeros(4, 7)
    for rank in range(size):
        layer = RowParallelLinear(12, 7, context=context(rank, size), prefix="p", bias=True)
        load(layer, "weight", weight)
        load(layer, "bias", bias)
        layer.process_weights_after_loading()
        part = layer.input_part
        inputs = torch.zeros(4, part.padded)
        inputs[:, : part.size] = X[:, part.first : part.first + part.size]
        total += layer(inputs)
    torch.testing.assert_close(total, X @ weight.T + bias)


def test_merged_matrices_load_one_by_one_or_together(context: Any) -> None:
    gate, up = matrix(6, 12, 1), matrix(6, 12, 2)
    for rank in range(2):
        apart, together = (
            MergedColumnParallelLinear(12, (6, 6), context=context(rank, 2), prefix="p") for _ in range(2)
        )
        load(apart, "weight", gate, 0)
        load(apart, "weight", up, 1)
        load(together, "weight", torch.cat((gate, up)))
        assert torch.equal(apart.weight, together.weight)
        rows = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(apart.weight, torch.cat((gate[rows], up[rows])))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(6, 3, 1), (6, 3, 2), (6, 3, 3), (8, 2, 4), (8, 1, 8), (9, 3, 4)]
)
def test_query_heads_stand_with_their_key_heads(context: Any, num_heads: int, num_kv_heads: int, size: int) -> None:
    """Row r of each matrix holds the number of its head; padding heads are zero."""
    if size == 4 and num_heads == 9:
        with pytest.raises(ConfigError, match="--tensor-parallel-size is 4"):
            local_heads(num_heads, num_kv_heads, rank=0, world_size=size)
        return
    group, seen = num_heads // num_kv_heads, []
    numbers = torch.arange(1, num_heads + 1).repeat_interleave(2).float()[:, None].expand(-1, 12)
    for rank in range(size):
        layer = QKVParallelLinear(12, 2, num_heads, num_kv_heads, context=context(rank, size), prefix="p")
        load(layer, "weight", numbers, "q")
        load(layer, "weight", numbers[: 2 * num_kv_heads], "k")
        load(layer, "weight", -numbers[: 2 * num_kv_heads], "v")
        heads = layer.heads
        q, k, v = layer.weight[::2, 0].split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))
        assert torch.equal(k, -v)
        local_group = heads.num_heads // heads.num_kv_heads
        for number, head in enumerate(q.tolist()):
            key_head = k[number // local_group].item()
            assert (head == 0 and key_head == 0) or (head - 1) // group == key_head - 1
        seen += [head for head in q.tolist() if head]
        output = layer.output_part
        assert (output.first, output.size) == (2 * heads.first_head, 2 * heads.num_real_heads)
    assert sorted(seen) == list(range(1, num_heads + 1))


@pytest.mark.parametrize("shape", [(10, 11), (9, 12), (11, 12), (20, 12), (5, 12), (120,), (1, 10, 12)])
@pytest.mark.parametrize("size", [1, 2])
def test_tensor_of_another_size_is_refused(context: Any, shape: tuple[int, ...], size: int) -> None:
    layers = [
        ColumnParallelLinear(12, 10, context=context(0, size), prefix="model.up", bias=False),
        RowParallelLinear(12, 10, context=context(0, size), prefix="model.up"),
        ReplicatedLinear(12, 10, context=context(0, size), prefix="model.up"),
    ]
    for layer in layers:
        with pytest.raises(WeightsError, match=r"model\.up"):
            load(layer, "weight", torch.zeros(shape))


def test_integers_do_not_become_dense_weights(context: Any) -> None:
    layer = ReplicatedLinear(12, 10, context=context(), prefix="p")
    with pytest.raises(WeightsError, match="stored as int8, but the model needs float32"):
        load(layer, "weight", torch.zeros(10, 12, dtype=torch.int8))


class Doubling(TorchLinearBackend):
    """Its packed form is no tensor, and counts how often it was made."""

    num_packed = 0

    def pack(self, weight_OI: torch.Tensor) -> Any:
        self.num_packed += 1
        return {"weight": weight_OI.clone()}

    def apply(self, x_TI: torch.Tensor, packed: Any, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(x_TI, packed["weight"], bias_O)


def test_packing_drops_the_dense_weight_once_and_a_second_load_packs_again(context: Any) -> None:
    backend = Doubling()
    layer = ReplicatedLinear(12, 10, context=context(linear=backend), prefix="p")
    for seed in (1, 2):
        weight = matrix(10, 12, seed)
        load(layer, "weight", weight)
        layer.process_weights_after_loading()
        layer.process_weights_after_loading()
        assert layer.weight.numel() == 0
        torch.testing.assert_close(layer(X), X @ weight.T)
    assert backend.num_packed == 2


def test_packed_form_that_is_the_weight_itself_is_kept(context: Any) -> None:
    layer = ReplicatedLinear(12, 10, context=context(), prefix="p")
    layer.process_weights_after_loading()
    assert layer.packed.data_ptr() == layer.weight.data_ptr()


def test_gated_layer_asks_for_the_fused_kernel_first(context: Any) -> None:
    class Fused(TorchLinearBackend):
        def apply_gated_silu(self, x_TI: torch.Tensor, packed: Any) -> torch.Tensor | None:
            return torch.full((len(x_TI), packed.shape[0] // 2), 7.0)

    for backend, is_fused in ((Fused(), True), (TorchLinearBackend(), False)):
        layer = MergedColumnParallelLinear(12, (6, 6), context=context(linear=backend), prefix="p")
        weight = matrix(12, 12)
        load(layer, "weight", weight)
        layer.process_weights_after_loading()
        gate, up = (X @ weight.T).chunk(2, dim=-1)
        want = torch.full((4, 6), 7.0) if is_fused else torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(layer.forward_gated_silu(X), want)


class PackedMethod(LinearMethod):
    """Two values an element along the outputs, and a scale for each group of four inputs."""

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
        rows = sum(output_partition_sizes)
        shapes = {
            "codes": ((input_size_per_partition, rows // 2), torch.int32),
            "scales": ((input_size_per_partition // 4, rows), torch.float32),
        }
        for name, (shape, dtype) in shapes.items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            parameter.input_dim, parameter.output_dim = 0, 1  # type: ignore[attr-defined]
            parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def apply(self, layer: Any, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        values = torch.stack((layer.codes & 255, layer.codes >> 8), dim=-1).flatten(1).float()
        return x_TI @ (values * layer.scales.repeat_interleave(4, dim=0))


class PackedConfig(QuantizationConfig):
    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    @classmethod
    def from_config(cls, config: Any) -> PackedConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return None if prefix.endswith("dense") else PackedMethod()


def test_packed_values_and_groups_of_scales_are_sharded_like_dense_weights(context: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    low, high = (torch.randint(0, 99, (16, 8), generator=generator, dtype=torch.int32) for _ in range(2))
    codes, scales = low | high << 8, torch.rand(4, 16, generator=generator)
    dense = torch.stack((low, high), dim=-1).flatten(1).float() * scales.repeat_interleave(4, dim=0)
    x = torch.randn(3, 16, generator=generator)
    columns, rows = [], torch.zeros(3, 16)
    for rank in range(2):
        environment = context(rank, 2, quantization=PackedConfig())
        column = MergedColumnParallelLinear(16, (16, 16), context=environment, prefix="up")
        row = RowParallelLinear(16, 16, context=environment, prefix="down")
        for name, tensor in (("codes", codes), ("scales", scales)):
            load(column, name, tensor, 0)
            load(column, name, tensor, 1)
            load(row, name, tensor)
        columns.append(column(x))
        rows += row(x[:, 8 * rank : 8 * rank + 8])
    whole = x @ dense
    for matrix_number in range(2):
        joined = torch.cat([part[:, 8 * matrix_number : 8 * matrix_number + 8] for part in columns], dim=-1)
        torch.testing.assert_close(joined, whole)
    torch.testing.assert_close(rows, whole)


def test_method_may_leave_a_layer_dense(context: Any) -> None:
    layer = ReplicatedLinear(12, 10, context=context(quantization=PackedConfig()), prefix="head.dense")
    assert layer.weight.shape == (10, 12)
