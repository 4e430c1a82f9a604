"""The suite of attention backends on the twin, and its oracle against numbers worked by hand."""

from __future__ import annotations

import math

import torch
from rabbet_sdk.conformance import AttentionConformance
from rabbet_sdk.oracles.attention import attention

from rabbet.contracts.attention import AttentionLayerSpec


class TestStrict(AttentionConformance):
    plugin = "attention/strict"


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
    cap = AttentionLayerSpec(name="a", scale=1.0, soft_cap=1.0)
    share = 1 / (1 + math.exp(-math.tanh(2.0)))
    assert abs(attention(cap, _rows(1.0), _rows(0.0, 2.0), values[:2]).item() - (1 + share)) < 1e-12
