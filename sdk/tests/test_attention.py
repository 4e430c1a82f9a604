"""The suite of attention backends on the twin, and its oracle against numbers worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rabbet_sdk.conformance import AttentionConformance
from rabbet_sdk.conformance._attention_graphs import captured, held
from rabbet_sdk.conformance._attention_rig import Rig, Setup
from rabbet_sdk.mutants.attention import GraphAttention
from rabbet_sdk.oracles.attention import attention

from rabbet.contracts.attention import AttentionLayerSpec


class TestStrict(AttentionConformance):
    plugin = "attention/strict"


@pytest.mark.parametrize("capture", [held, captured])
def test_the_base_of_the_mutants_that_cannot_be_captured_can(capture: Any) -> None:
    for setup in (Setup(), Setup(dtype="bfloat16", window=5, heads=4, kv_heads=2)):

        def make(setup: Setup) -> Rig:
            generator = torch.Generator().manual_seed(1)
            return Rig(backend_class=GraphAttention, setup=setup, device=torch.device("cpu"), generator=generator)

        AttentionConformance()._replays(make, SimpleNamespace(plugin_class=GraphAttention), setup, capture)


def _rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


def test_oracle_by_hand() -> None:
    layer = AttentionLayerSpec(name="a", scale=0.5)
    out = attention(layer, _rows(2.0), _rows(0.0, math.log(3.0)), _rows(4.0, 8.0))
    assert out.item() == torch.tensor(7.0).double().item() or abs(out.item() - 7.0) < 1e-12


def test_oracle_masks_by_hand() -> None:
    values, zeros = _rows(1.0, 2.0, 4.0), _rows(0.0, 0.0, 0.0)
    window = AttentionLayerSpec(name="a", scale=1.0, window=2)
    assert attention(window, zeros, zeros, values).flatten().tolist() == [1.0, 1.5, 3.0]
    plain = AttentionLayerSpec(name="a", scale=1.0)
    assert attention(plain, zeros[:1], zeros[:2], values[:2], is_causal=False).item() == 1.5
    sinks = AttentionLayerSpec(name="a", scale=1.0, sinks=torch.zeros(1))
    assert attention(sinks, zeros[:1], zeros[:1], values[:1]).item() == 0.5
    alibi = AttentionLayerSpec(name="a", scale=1.0, alibi_slopes=torch.tensor([math.log(3.0)], dtype=torch.float64))
    assert abs(attention(alibi, zeros[:1], zeros[:2], values[:2]).item() - (1 / 3 + 2) / (1 + 1 / 3)) < 1e-12
    ahead = attention(window, zeros, zeros, values, is_causal=False)
    assert torch.allclose(ahead, _rows(1.5, 7 / 3, 3.0)), "without causality a window reaches both ways"
    cap = AttentionLayerSpec(name="a", scale=1.0, soft_cap=1.0)
    share = 1 / (1 + math.exp(-math.tanh(2.0)))
    assert abs(attention(cap, _rows(1.0), _rows(0.0, 2.0), values[:2]).item() - (1 + share)) < 1e-12
