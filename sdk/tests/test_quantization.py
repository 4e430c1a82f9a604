"""The suite of quantisation methods on the twin, and its oracles against numbers worked by hand."""

from __future__ import annotations

import torch
from rabbet_sdk.conformance import QuantizationConformance
from rabbet_sdk.oracles.quantization import INT8_PER_CHANNEL, dense_experts


class TestStrict(QuantizationConformance):
    plugin = "quantization/strict"


def test_dequantiser_reads_bytes_and_words() -> None:
    scales = torch.tensor([0x3F800000, 0x00000001, -0x80000000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    codes = torch.tensor([[127, -128], [2, -1], [1, 5], [1, -1]], dtype=torch.int8)
    values = INT8_PER_CHANNEL.unpack({"weight": codes, "weight_scale": scales})
    assert values[0].tolist() == [127.0, -128.0]
    assert values[1].tolist() == [2 * 2.0**-149, -(2.0**-149)]
    assert values[2].tolist() == [0.0, 0.0]
    assert values[3].tolist() == [float("inf"), -float("inf")]
    nan = torch.tensor([float("nan")])
    assert INT8_PER_CHANNEL.unpack({"weight": codes[:1], "weight_scale": nan}).isnan().all()


def test_packing_loses_half_a_step_at_most() -> None:
    dense = torch.tensor([[127.0, -63.4, 0.4], [0.0, 0.0, 0.0]])
    packed = INT8_PER_CHANNEL.pack(dense)
    assert packed["weight"].tolist() == [[127, -63, 0], [0, 0, 0]]
    assert INT8_PER_CHANNEL.unpack(packed).tolist() == [[127.0, -63.0, 0.0], [0.0, 0.0, 0.0]]


def test_expert_oracle_by_hand() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[2.0]], dtype=torch.float64)
    # Expert 1 doubles: silu(2 * 2) * (1 * 2) * 3 at the weight 0.5; expert 0 is not chosen.
    got = dense_experts(x, [(one * 9, one), (one * 2, one)], [one, one * 3], torch.tensor([[0.5]]), torch.tensor([[1]]))
    silu = 4 / (1 + torch.exp(torch.tensor(-4.0, dtype=torch.float64)))
    assert torch.allclose(got, (silu * 2 * 3 * 0.5).reshape(1, 1))
