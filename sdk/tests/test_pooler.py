"""The suite of poolers on the twin, and its reference by hand."""

from __future__ import annotations

import torch
from rabbet_sdk.conformance import PoolerConformance
from rabbet_sdk.conformance.pooler import _mean


class TestStrict(PoolerConformance):
    plugin = "pooler/strict"


def test_mean_by_hand() -> None:
    assert _mean(torch.tensor([[6.0, 0.0], [0.0, 8.0]])).tolist() == torch.tensor([0.6, 0.8]).tolist()
