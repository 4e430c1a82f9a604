"""The suite of expert backends on the twin, and its oracle against numbers worked by hand."""

from __future__ import annotations

import math

import torch
from rabbet_sdk.conformance import MoEConformance
from rabbet_sdk.oracles.quantization import dense_experts


class TestStrict(MoEConformance):
    plugin = "moe/strict"


def test_oracle_by_hand() -> None:
    """Two experts of one inner unit; silu(ln 3) is 3/4 of ln 3."""
    log3 = math.log(3.0)
    one = torch.ones(1, 1, dtype=torch.float64)
    gates = [(one * log3, one * 4), (one * 0, one * 9)]
    x, down = torch.tensor([[1.0], [2.0]], dtype=torch.float64), [one * 2, one * 5]
    got = dense_experts(x, gates, down, torch.tensor([[0.5, 0.25], [1.0, 1.0]]), torch.tensor([[0, 1], [1, 1]]))
    # Expert 0 of 1: silu(ln 3) * 4 * 2; expert 1 has a gate of 0 and gives nothing.
    assert torch.allclose(got, torch.tensor([[0.5 * 0.75 * log3 * 8], [0.0]], dtype=torch.float64))
