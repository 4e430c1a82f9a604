"""The suite of checkpoint formats on the twin, and its writer against bytes worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rabbet_sdk.conformance import WeightsConformance
from rabbet_sdk.oracles.weights import bits_of, random_bits, write_plain


class TestStrict(WeightsConformance):
    plugin = "weights/strict"


def test_writer_by_hand(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([[1.0], [-2.0]]), "b": torch.tensor(513, dtype=torch.int16), "c": torch.ones(0, 2)}
    write_plain(tmp_path, tensors, {"architectures": []})
    assert (tmp_path / "tensors.raw").read_bytes().hex() == "0000803f000000c00102"
    assert json.loads((tmp_path / "tensors.json").read_text())["b"] == {"dtype": "int16", "shape": [], "offset": 8}


def test_random_bits_hold_nan_and_come_again() -> None:
    first = random_bits((4096,), torch.bfloat16, 3)
    assert bits_of(first) == bits_of(random_bits((4096,), torch.bfloat16, 3))
    assert first.isnan().any()
    assert random_bits((0, 4), torch.int8, 0).shape == (0, 4)
    assert set(random_bits((99,), torch.bool, 0).tolist()) == {True, False}
