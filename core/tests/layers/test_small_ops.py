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
