"""The suite of platforms on the twin, and its oracles against numbers worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from rabbet_sdk.conformance import Case, Claims, PlatformConformance
from rabbet_sdk.conformance._platform_live import Live
from rabbet_sdk.mutants.platform import DrawingPlatform, RecordingPlatform
from rabbet_sdk.oracles.layer_ops import gated, rms_norm, rotary


class TestStrict(PlatformConformance):
    plugin = "platform/strict"


def test_graphs_that_faults_are_planted_in_are_right() -> None:
    """A mutant proves nothing where its healthy form fails too."""
    suite, claims = PlatformConformance(), Claims({"features": ["graphs"]})
    subject: Any = SimpleNamespace(plugin_class=RecordingPlatform)
    live = Live(platform=RecordingPlatform(), device=torch.device("cpu"), claims=claims, generator=torch.Generator())
    suite.test_a_replay_is_a_run(live)
    suite.test_what_cannot_be_captured_is_refused(live)
    threads = torch.get_num_threads()
    suite.test_sessions_take_turns(live, subject)
    torch.set_num_threads(threads)


def test_draws_that_faults_are_planted_in_are_right() -> None:
    suite, claims = PlatformConformance(), Claims({"features": ["async_steps"]})
    generator = torch.Generator().manual_seed(0)
    live = Live(platform=DrawingPlatform(), device=torch.device("cpu"), claims=claims, generator=generator)
    suite.test_draws_follow_the_distribution(live, Case(id="float32", value="float32"))
    suite.test_draws_are_a_rows_own_affair(live)


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
