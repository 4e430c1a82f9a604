"""Norms, gated activations and experts against their formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rabbet.errors import WeightsError
from rabbet.layers import FusedMoE, GeluAndMul, LayerNorm, RMSNorm, SiluAndMul
from rabbet.layers.reference import TorchMoEBackend


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_norm_with_and_without_a_residual(context: Any) -> None:
    norm = RMSNorm(6, eps=1e-5, context=context())
    norm.weight.copy_(torch.rand(6))
    x, residual = torch.randn(4, 6), torch.randn(4, 6)

    def formula(y: torch.Tensor) -> torch.Tensor:
        return y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.double()

    close(norm(x), formula(x.double()))
    out, total = norm.add(x.clone(), residual.clone())
    close(total, x.double() + residual.double())
    close(out, formula(x.double() + residual.double()))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(context: Any, bias: bool) -> None:
    norm = LayerNorm(6, eps=1e-5, context=context(), bias=bias)
    x = torch.randn(4, 6)
    close(norm(x), F.layer_norm(x.double(), (6,), eps=1e-5))
    assert (norm.bias is not None) == bias


def test_gated_activations(context: Any) -> None:
    x = torch.randn(4, 10)
    gate, up = x.double().chunk(2, dim=-1)
    close(SiluAndMul(context=context())(x), F.silu(gate) * up)
    for approximate in ("none", "tanh"):
        close(GeluAndMul(context=context(), approximate=approximate)(x), F.gelu(gate, approximate=approximate) * up)


def experts(context: Any, renormalize: bool = True) -> FusedMoE:
    layer = FusedMoE(
        num_experts=5,
        top_k=2,
        hidden_size=6,
        intermediate_size=7,
        context=context,
        prefix="mlp.experts",
        renormalize=renormalize,
    )
    generator = torch.Generator().manual_seed(0)
    for expert in range(5):
        for part, shape in (("gate", (7, 6)), ("up", (7, 6)), ("down", (6, 7))):
            parameter: Any = layer.down if part == "down" else layer.gate_up
            parameter.weight_loader(parameter, torch.randn(shape, generator=generator), (expert, part))
    layer.process_weights_after_loading()
    return layer


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_are_the_weighted_sum_of_the_chosen(context: Any, renormalize: bool) -> None:
    layer = experts(context(), renormalize)
    x, logits = torch.randn(9, 6), torch.randn(9, 5)
    want = torch.zeros(9, 6, dtype=torch.float64)
    for row in range(9):
        weights = logits[row].double().softmax(-1)
        chosen = weights.topk(2)
        scale = chosen.values.sum() if renormalize else 1.0
        for weight, expert in zip(chosen.values, chosen.indices, strict=True):
            gate, up = (layer.gate_up[expert].double() @ x[row].double()).chunk(2)
            want[row] += weight / scale * (layer.down[expert].double() @ (F.silu(gate) * up))
    torch.testing.assert_close(layer(x, logits).double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_experts_divided_by_their_inner_size_add_up(context: Any, size: int) -> None:
    x, logits = torch.randn(9, 6), torch.randn(9, 5)
    total = sum(experts(context(rank, size))(x, logits) for rank in range(size))
    torch.testing.assert_close(total, experts(context())(x, logits), rtol=1e-4, atol=1e-5)


def test_packed_experts_replace_dense_ones_and_load_again(context: Any) -> None:
    class Copying(TorchMoEBackend):
        def pack(self, gate_up_X2NI: torch.Tensor, down_XIN: torch.Tensor) -> Any:
            return gate_up_X2NI.clone(), down_XIN.clone()

    layer = experts(context(moe=Copying()))
    assert layer.gate_up.numel() == layer.down.numel() == 0
    down: Any = layer.down
    for expert in range(5):
        down.weight_loader(down, torch.zeros(6, 7), (expert, "down"))
    assert layer.down.shape == (5, 6, 7)


def test_expert_of_another_size_is_refused(context: Any) -> None:
    layer = experts(context())
    parameter: Any = layer.gate_up
    with pytest.raises(WeightsError, match=r"mlp\.experts"):
        parameter.weight_loader(parameter, torch.zeros(8, 6), (0, "gate"))


def register(layer: FusedMoE, name: str, shape: tuple[int, ...], **axes: int) -> Any:
    parameter: Any = torch.nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
    for key, value in axes.items():
        setattr(parameter, key, value)
    parameter.weight_loader = layer.load_shard
    layer.register_parameter(name, parameter)
    return parameter


@pytest.mark.parametrize("rank", [0, 1])
def test_what_belongs_to_an_experts_matrix_is_divided_like_it(context: Any, rank: int) -> None:
    """Scales of rows, of groups of inputs, and of whole matrices: of gate and up by outputs, of down by inputs."""
    inner, hidden, group = 16, 12, 4
    layer = FusedMoE(
        num_experts=3, top_k=2, hidden_size=hidden, intermediate_size=inner, context=context(rank, 2), prefix="experts"
    )
    part = inner // 2
    mine, groups = slice(part * rank, part * (rank + 1)), slice(2 * rank, 2 * (rank + 1))
    rows, hidden_rows = torch.arange(float(inner)), torch.arange(float(hidden))
    by_group, down_by_group = torch.rand(inner, hidden // group), torch.rand(hidden, inner // group)
    # name, shape of the parameter, its axes, tensor of the checkpoint, matrix, what expert 1 must hold of it
    cases: list[tuple[str, tuple[int, ...], dict[str, int], torch.Tensor, str, Any, torch.Tensor]] = [
        ("a", (3, 2 * part), {"output_dim": 1}, rows, "gate", slice(0, part), rows[mine]),
        ("b", (3, 2 * part), {"output_dim": 1}, rows, "up", slice(part, 2 * part), rows[mine]),
        ("c", (3, hidden), {"output_dim": 1}, hidden_rows, "down", slice(None), hidden_rows),
        ("d", (3, hidden, 1), {"output_dim": 1}, hidden_rows[:, None], "down", slice(None), hidden_rows[:, None]),
        (
            "e", (3, 2 * part, hidden // group), {"output_dim": 1, "input_dim": 2}, by_group, "up",
            slice(part, 2 * part), by_group[mine],
        ),
        (
            "f", (3, hidden, part // group), {"output_dim": 1, "input_dim": 2}, down_by_group, "down",
            slice(None), down_by_group[:, groups],
        ),
        ("g", (3, 2), {}, torch.tensor(7.0), "up", slice(1, 2), torch.tensor([7.0])),
        ("h", (3,), {}, torch.tensor([7.0]), "down", (), torch.tensor(7.0)),
    ]  # fmt: skip
    for name, shape, axes, tensor, matrix, place, want in cases:
        parameter = register(layer, name, shape, **axes)
        parameter.weight_loader(parameter, tensor, (1, matrix))
        assert torch.equal(parameter[1][place], want), (name, parameter[1], want)
        untouched = parameter.numel() - want.numel()
        assert (parameter == -1).sum() == untouched, f"{name} fills something else"


def test_scales_of_another_size_are_refused(context: Any) -> None:
    layer = experts(context())
    for name, shape, axes, tensor, matrix in (
        ("a", (5, 14), {"output_dim": 1}, torch.ones(8), "up"),
        ("b", (5, 6), {"output_dim": 1}, torch.ones(7), "down"),
        ("c", (5, 6, 1), {"output_dim": 1, "input_dim": 2}, torch.ones(6, 2), "down"),
    ):
        parameter = register(layer, name, shape, **axes)
        with pytest.raises(WeightsError, match=r"experts"):
            parameter.weight_loader(parameter, tensor, (1, matrix))
