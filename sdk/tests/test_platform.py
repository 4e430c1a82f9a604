"""The suite of platforms on the twin, and its oracles against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from rabbet_sdk.check import check_plugin
from rabbet_sdk.conformance import PlatformConformance
from rabbet_sdk.mutants.platform import GRAPH_CLAIMS
from rabbet_sdk.oracles.layer_ops import gated, rms_norm, rotary


class TestStrict(PlatformConformance):
    plugin = "platform/strict"


def test_graphs_that_faults_are_planted_in_are_right(fake_dist: Any) -> None:
    """A mutant proves nothing where its healthy form fails too."""
    manifest = (
        'schema = 1\n[[provides]]\nkind = "platform"\nname = "recording"\ncontract = ">=1.0,<2"\n'
        f"[provides.claims]\n{GRAPH_CLAIMS}\n"
    )
    module = (
        "from rabbet.contracts import register_platform\nfrom rabbet_sdk.mutants.platform import RecordingPlatform\n"
        "@register_platform('recording')\nclass Plugin(RecordingPlatform):\n    pass\n"
    )
    provides = {"platform/recording": "acme_recording.plugin:Plugin"}
    fake_dist("acme-recording", provides=provides, manifest=manifest, modules={"plugin.py": module})
    result = check_plugin("platform/recording", level=3)
    # The module with the faults imports torch.
    assert [name for name, _ in result.failures] == ["test_import_brings_no_torch"], result.failures
    assert result.counts["passed"] > 40


def test_norm_by_hand() -> None:
    x, weight = torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rms_norm(x, weight, 0.0, torch.float64).tolist() == [[1.2, 3.2, 0.0, 0.0]]
    # The mean of the squares is 6.25; with 2.75 more the root is 3.
    assert rms_norm(x, weight, 2.75, torch.float64).tolist() == [[1.0, 8 / 3, 0.0, 0.0]]


def test_rotation_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 9.0]]])
    table = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -1.0, 1.0, 0.0]])  # a quarter turn, a half turn
    position = torch.tensor([1])
    assert rotary(x, position, table, is_neox=True, dtype=torch.float64).tolist() == [[[-3.0, -2.0, 1.0, -4.0, 9.0]]]
    assert rotary(x, position, table, is_neox=False, dtype=torch.float64).tolist() == [[[-2.0, 1.0, -3.0, -4.0, 9.0]]]


def test_activations_by_hand() -> None:
    x = torch.tensor([0.0, math.log(3.0), 5.0, 4.0], dtype=torch.float64)
    assert torch.allclose(gated(x, "silu"), torch.tensor([0.0, 3 * math.log(3.0)], dtype=torch.float64))
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert abs(float(gated(one, "gelu")) - 2 * 0.8413447460685429) < 1e-12
    assert abs(float(gated(one, "gelu_tanh")) - 2 * 0.8411919906082768) < 1e-9
