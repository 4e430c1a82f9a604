"""Logits of small random Qwen2 and Qwen3 models are those of transformers; wrong checkpoints are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rabbet_model_qwen3.model import Qwen2ForCausalLM, Qwen3ForCausalLM
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen3Config

from rabbet.contracts.model import ModelQuery
from rabbet.errors import WeightsError

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
}
QWEN2_VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "window in upper layers": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "window switched off": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    "yarn rope": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
}
QWEN3_VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"head_dim": 8},
    "tied, heads wider than the model": {"tie_word_embeddings": True, "head_dim": 16},
    "biases": {"attention_bias": True, "head_dim": 8},
    "window in one layer": {
        "head_dim": 8,
        "sliding_window": 4,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("variant", QWEN2_VARIANTS)
def test_qwen2_logits_are_those_of_transformers(variant: str, checkpoint: Any) -> None:
    saved = checkpoint(Qwen2Config(**(SMALL | QWEN2_VARIANTS[variant])))
    model, context = saved.load(Qwen2ForCausalLM)
    for chunk in (64, 3):
        saved.assert_equal(saved.logits(model, context, chunk))


@pytest.mark.parametrize("variant", QWEN3_VARIANTS)
def test_qwen3_logits_are_those_of_transformers(variant: str, checkpoint: Any) -> None:
    saved = checkpoint(Qwen3Config(**(SMALL | QWEN3_VARIANTS[variant])))
    model, context = saved.load(Qwen3ForCausalLM)
    for chunk in (64, 3):
        saved.assert_equal(saved.logits(model, context, chunk))


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize(
    ("config_class", "model_class"), [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]
)
def test_ranks_add_up_to_one(config_class: Any, model_class: Any, size: int, checkpoint: Any, ranks: Any) -> None:
    saved = checkpoint(config_class(**(SMALL | {"tie_word_embeddings": True})))
    for logits in ranks(size).run(lambda state: saved.logits(*saved.load(model_class, state), chunk=5)):
        saved.assert_equal(logits)


def test_window_reaches_only_the_layers_that_have_it(checkpoint: Any) -> None:
    saved = checkpoint(Qwen2Config(**(SMALL | QWEN2_VARIANTS["window in upper layers"])))
    _, context = saved.load(Qwen2ForCausalLM)
    assert [layer.spec.window for layer in context.attention_layers.values()] == [None, 4, 4]


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.bias", "model.layers.0.self_attn.q_norm.weight"])
def test_missing_bias_or_head_norm_is_named(name: str, checkpoint: Any) -> None:
    is_bias = name.endswith("bias")
    saved = checkpoint((Qwen2Config if is_bias else Qwen3Config)(**SMALL))
    path = saved.directory / "model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if key != name}, path)
    with pytest.raises(WeightsError, match=r"qkv_proj\.bias \(k\)" if is_bias else r"layers\.0\.self_attn\.q_norm"):
        saved.load(Qwen2ForCausalLM if is_bias else Qwen3ForCausalLM)


def test_qwen2_checkpoint_does_not_pass_for_qwen3(checkpoint: Any) -> None:
    saved = checkpoint(Qwen2Config(**SMALL))
    saved.config = Qwen3Config(**(SMALL | {"head_dim": 8}))
    with pytest.raises(WeightsError, match="no place for"):
        saved.load(Qwen3ForCausalLM)


def test_unknown_rope_and_pipeline_stages_are_refused() -> None:
    config = Qwen3Config(**SMALL).to_dict() | {"rope_parameters": {"rope_type": "longrope"}}
    query = ModelQuery(architecture="Qwen3ForCausalLM", config=config, pipeline_parallel_size=2)
    assert [refusal.code for refusal in Qwen3ForCausalLM.supports(query)] == ["ROPE", "PIPELINE"]


def test_empty_step_gives_no_rows(checkpoint: Any) -> None:
    saved = checkpoint(Qwen3Config(**SMALL))
    model, context = saved.load(Qwen3ForCausalLM)
    saved.texts, saved.expected = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, 99)]
    from rabbet.layers import ForwardContext, set_forward_context

    with torch.inference_mode(), set_forward_context(ForwardContext()):
        hidden = model(saved.texts[0], torch.zeros(0, dtype=torch.long))
    assert model.compute_logits(hidden).shape == (0, 99)
    assert len(context.attention_layers) == 3
