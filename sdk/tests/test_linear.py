"""The suite of linear backends on the twin, its oracles against numbers worked by hand, and its look into packed weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from rabbet_sdk.conformance import LinearConformance
from rabbet_sdk.conformance._kernels import held_bytes, inside
from rabbet_sdk.oracles.linear import gated_silu, linear


class TestStrict(LinearConformance):
    plugin = "linear/strict"


def test_oracles_by_hand() -> None:
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0], [7.0, 11.0], [0.5, 0.25]])
    assert linear(x, weight).tolist() == [[13.0, 29.0, 1.0]]
    assert linear(x, weight, torch.tensor([1.0, -1.0, 0.5])).tolist() == [[14.0, 28.0, 1.5]]
    both = torch.tensor([0.0, math.log(3.0), 5.0, 4.0], dtype=torch.float64)
    assert torch.allclose(gated_silu(both), torch.tensor([0.0, math.log(3.0) * 0.75 * 4], dtype=torch.float64))


@dataclass(slots=True)
class Packed:
    parts: Any


def test_a_view_inside_poison_shows_its_numbers_only() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    view = inside(tensor, float("nan"))
    assert torch.equal(view, tensor) and not view.is_contiguous()
    assert int(view._base.isnan().sum()) == 4 * 6 - 6


def test_bytes_of_packed_weights_are_found_wherever_they_are() -> None:
    one, other = torch.zeros(100), torch.zeros(10, dtype=torch.float64)

    def closure() -> torch.Tensor:
        return other

    assert held_bytes(Packed(parts={"a": [one, one[:5]], "b": closure})) == 480
    assert held_bytes(closure) == 80
