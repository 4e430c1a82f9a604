"""The suite of model architectures on the twin."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from rabbet_sdk.conformance import ModelConformance
from rabbet_sdk.oracles.model import PlainAttention


class TestStrict(ModelConformance):
    plugin = "model/StrictForCausalLM"


def test_plain_attention_by_hand() -> None:
    layer = SimpleNamespace(name="a", scale=1.0, soft_cap=None, window=None)
    backend, out = PlainAttention(), torch.empty(2, 1, 1)
    q = k = torch.zeros(2, 1, 1)
    v = torch.tensor([[[2.0]], [[4.0]]])
    backend.forward(layer, q, k, v, None, [(0, slice(0, 2))], out)
    assert out.flatten().tolist() == [2.0, 3.0]
    layer.window = 1
    backend.forward(layer, q[:1], k[:1], torch.full((1, 1, 1), 9.0), None, [(0, slice(0, 1))], out)
    assert out[0].item() == 9.0
