"""Angles equal transformers' for every kind of scaling, and rotation equals its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rabbet.errors import ConfigError
from rabbet.layers import BuildContext, get_rope
from rabbet.layers.reference import TorchLayerOps, TorchLinearBackend
from rabbet.layers.rotary import inverse_frequencies, rope_parameters
from rabbet.parallel import ParallelState

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, tuned": {
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "attention_factor": 0.7,
    },
    "yarn, mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn, not truncated": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


def context(max_model_len: int = 64) -> BuildContext:
    return BuildContext(
        parallel=ParallelState.single(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        linear=TorchLinearBackend(),
        ops=TorchLayerOps(),
        max_model_len=max_model_len,
    )


def config(kind: str, theta: float, **rope: Any) -> LlamaConfig:
    values = {"rope_type": kind, "rope_theta": theta, **rope}
    return LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=values)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("name", KINDS)
def test_angles_are_those_of_transformers(name: str, theta: float) -> None:
    kind = name.split(",")[0]
    hub = config(kind, theta, **KINDS[name])
    # Past the trained length, where the dynamic kind has an effect.
    length = 6000
    want, want_factor = ROPE_INIT_FUNCTIONS[kind](hub, device="cpu", seq_len=length)
    got, factor = inverse_frequencies(rope_parameters(hub), 64, max_position=length, model_position=2048)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert factor == pytest.approx(want_factor)


def test_plain_angles_and_partial_rotation() -> None:
    hub = config("default", 1e4, partial_rotary_factor=0.5)
    rope = get_rope(hub, 64, context=context())
    assert rope.cos_sin.shape == (64, 32)
    angles = 3 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(rope.cos_sin[3], torch.cat((angles.cos(), angles.sin())))


def test_old_spelling_means_the_same() -> None:
    class Old:
        rope_theta = 5e5
        rope_scaling = {"type": "linear", "factor": 2.0}

    parameters = rope_parameters(Old())
    assert (parameters["rope_type"], parameters["rope_theta"], parameters["factor"]) == ("linear", 5e5, 2.0)


def test_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="rope_type is 'su'; known: default"):
        inverse_frequencies({"rope_type": "su", "rope_theta": 1e4}, 64, max_position=1, model_position=1)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotation_turns_each_pair_by_its_angle_and_leaves_the_rest(is_neox: bool) -> None:
    torch.manual_seed(0)
    rope = get_rope(config("default", 1e4, partial_rotary_factor=0.5), 8, context=context(), is_neox=is_neox)
    q, k = torch.randn(5, 3, 8), torch.randn(5, 2, 8)
    positions = torch.tensor([0, 1, 5, 63, 5])
    turned_q, turned_k = rope(positions, q.clone(), k.clone())
    pairs = [(0, 2), (1, 3)] if is_neox else [(0, 1), (2, 3)]
    for got, x in ((turned_q, q), (turned_k, k)):
        for number, (i, j) in enumerate(pairs):
            angle = positions[:, None] / 1e4 ** (2 * number / 4)
            torch.testing.assert_close(got[..., i], x[..., i] * angle.cos() - x[..., j] * angle.sin())
            torch.testing.assert_close(got[..., j], x[..., j] * angle.cos() + x[..., i] * angle.sin())
        assert torch.equal(got[..., 4:], x[..., 4:])
