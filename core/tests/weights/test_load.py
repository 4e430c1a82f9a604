"""Filling a model: every tensor has a place, every parameter a tensor, and the report counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rabbet.errors import WeightsError
from rabbet.weights import STANDARD_STACKS, WeightRules
from rabbet.weights.dummy import fill_with_noise
from rabbet.weights.load import finish_loading, load_weights


class Stacked(nn.Module):
    """Two matrices in one parameter; counts how often it was finished."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        self.num_finished = 0

    def load(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any) -> None:
        parameter.data[2 * shard_id : 2 * shard_id + 2].copy_(tensor)

    def process_weights_after_loading(self) -> None:
        self.num_finished += 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Stacked()
        self.norm = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "gate_proj.weight": torch.full((2, 3), 1.0),
        "up_proj.weight": torch.full((2, 3), 2.0),
        "norm": torch.full((3,), 3.0),
    }


RULES = WeightRules(stacks=STANDARD_STACKS)


def test_report_counts_tensors_bytes_and_parameters() -> None:
    model, seen = Model(), []
    report = load_weights(model, RULES, tensors().items(), progress=lambda name, size: seen.append((name, size)))
    assert model.gate_up_proj.weight[:, 0].tolist() == [1, 1, 2, 2]
    assert model.norm.tolist() == [3, 3, 3]
    assert (report.num_tensors, report.size_bytes) == (3, 60)
    assert (report.num_parameters, report.parameters_bytes) == (2, 54)
    assert report.seconds >= 0
    assert seen == [("gate_proj.weight", 24), ("up_proj.weight", 24), ("norm", 12)]
    assert model.gate_up_proj.num_finished == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"up_proj.weight": None}, r"lacks gate_up_proj\.weight \(1\)"),
        ({"gate_proj.weight": None, "up_proj.weight": None}, r"gate_up_proj\.weight \(0, 1\)"),
        ({"norm": None}, "lacks norm"),
        ({"norm.bias": torch.ones(3)}, r"no place for norm\.bias"),
        ({"norm": torch.ones(4)}, "tensor norm does not fit"),
        ({"norm": torch.ones(3, dtype=torch.int32)}, "tensor norm does not fit"),
        ({"up_proj.weight": torch.ones(2, 4)}, r"tensor up_proj\.weight does not fit"),
        ({f"x{i}": torch.ones(1) for i in range(9)}, "x0, x1, x2, x3, x4 and 4 more"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_packed(change: dict[str, Any], words: str) -> None:
    model = Model()
    given = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
    with pytest.raises(WeightsError, match=words) as caught:
        load_weights(model, RULES, given.items())
    assert caught.value.tensor is not None
    assert model.gate_up_proj.num_finished == 0


def test_rules_rename_ignore_and_excuse() -> None:
    rules = WeightRules(stacks=STANDARD_STACKS, renames=(("old.", ""),), ignored=("*.inv_freq",), optional=("norm",))
    given = {f"old.{name}": tensor for name, tensor in tensors().items() if name != "norm"}
    report = load_weights(Model(), rules, (given | {"rotary.inv_freq": torch.ones(2)}).items())
    assert (report.num_tensors, report.num_parameters) == (3, 1)


def test_noise_is_the_same_every_time_and_differs_between_matrices() -> None:
    def model() -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(64, 48, dtype=torch.float32) for name in ("a", "b")})

    first, second = model(), model()
    for item in (first, second):
        for name in ("a", "b"):
            item[name].bias.data.fill_(0.5)
    assert fill_with_noise(first) == fill_with_noise(second) == 2 * (64 * 48 + 48) * 4
    for name in ("a", "b"):
        assert torch.equal(first[name].weight, second[name].weight)
        assert (first[name].bias == 0.5).all()
    assert not torch.equal(first["a"].weight, first["b"].weight)
    assert first["a"].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert first["a"].weight.mean().abs().item() < 0.002


def test_rows_of_a_large_noisy_matrix_differ() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(40_000, 64, dtype=torch.bfloat16)})
    fill_with_noise(model)
    assert model["table"].weight[:, :8].float().unique(dim=0).shape[0] == 40_000


def test_finishing_reaches_every_layer_that_wants_it() -> None:
    model = Model()
    finish_loading(nn.ModuleList([model, nn.Linear(2, 2)]))
    assert model.gate_up_proj.num_finished == 1
