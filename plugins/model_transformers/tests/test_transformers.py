"""Models of transformers behind the engine's attention give the logits that they give by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from rabbet_model_transformers.model import TransformersForCausalLM
from safetensors.torch import load_file, save_file
from transformers.models.gptj import modeling_gptj

from rabbet.contracts.model import ModelQuery
from rabbet.errors import ConfigError, WeightsError

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "bos_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "gptj": ("GPTJConfig", GPT2 | {"rotary_dim": 4, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoXConfig", SMALL | {"rotary_pct": 0.5}),
    "gemma": ("GemmaConfig", GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", GROUPED | {"head_dim": 8, "sliding_window": 4, "num_hidden_layers": 7}),
    "phi": ("PhiConfig", GROUPED),
    "phi3": ("Phi3Config", GROUPED | {"sliding_window": 5}),
    "opt": ("OPTConfig", SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 48, "pad_token_id": 1}),
    "stablelm": ("StableLmConfig", GROUPED),
    "starcoder2": ("Starcoder2Config", GROUPED | {"sliding_window": 4}),
    "cohere": ("CohereConfig", GROUPED | {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", GROUPED | {"logits_scaling": 2.0, "attention_multiplier": 0.2}),
    "olmo2": ("Olmo2Config", GROUPED),
    "glm": ("GlmConfig", GROUPED | {"head_dim": 8}),
    "llama": ("LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 11, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("Qwen3MoeConfig", GROUPED | EXPERTS | {"num_experts": 12}),
    "deepseek_v3": (
        "DeepseekV3Config",
        SMALL
        | EXPERTS
        | {
            "head_dim": 4,
            "num_key_value_heads": 6,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
}

# Older versions of transformers have not moved this one to their attention interface; the plugin refuses it there.
SERVED = [name for name in MODELS if name != "gptj" or not hasattr(modeling_gptj, "GPTJ_ATTENTION_CLASSES")]


def config_of(name: str, **changes: Any) -> Any:
    class_name, values = MODELS[name]
    return getattr(transformers, class_name)(**(values | changes))


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_transformers_whole_and_in_chunks(name: str, checkpoint: Any) -> None:
    saved = checkpoint(config_of(name))
    model, context = saved.load(TransformersForCausalLM)
    assert len(context.attention_layers) == saved.config.num_hidden_layers
    for chunk in (64, 3):
        saved.assert_equal(saved.logits(model, context, chunk))


def test_windows_and_caps_reach_the_layers_that_have_them(checkpoint: Any) -> None:
    _, context = checkpoint(config_of("gemma2")).load(TransformersForCausalLM)
    specs = [layer.spec for layer in context.attention_layers.values()]
    assert [spec.window for spec in specs] == [4, None]
    assert {spec.soft_cap for spec in specs} == {50.0}
    assert {spec.scale for spec in specs} == {0.25}


def test_checkpoint_of_the_base_model_alone_loads(checkpoint: Any) -> None:
    """GPT-2's own files have no ``transformer.`` in front of their names."""
    saved = checkpoint(config_of("gpt2"))
    path = saved.directory / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}, path)
    saved.assert_equal(saved.logits(*saved.load(TransformersForCausalLM)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt_neox", "gpt_neox.layers.1.attention.dense.weight"),
        ("llama", "model.layers.0.mlp.up_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
        ("mixtral", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_missing_or_misshapen_tensor_is_named(name: str, tensor: str, checkpoint: Any) -> None:
    saved = checkpoint(config_of(name))
    path = saved.directory / "model.safetensors"
    tensors = load_file(path)
    kept = tensors.pop(tensor)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"layers\.[01]\."):
        saved.load(TransformersForCausalLM)
    save_file(tensors | {tensor: kept[:-1].contiguous()}, path)
    with pytest.raises(WeightsError, match=r"layers\.[01]\."):
        saved.load(TransformersForCausalLM)


def test_checkpoint_without_experts_is_refused(checkpoint: Any) -> None:
    saved = checkpoint(config_of("mixtral"))
    path = saved.directory / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if ".experts." not in name}, path)
    with pytest.raises(WeightsError, match=r"lacks base\.layers\.0\.mlp\.experts"):
        saved.load(TransformersForCausalLM)


def test_unexpected_tensor_is_named(checkpoint: Any) -> None:
    saved = checkpoint(config_of("phi"))
    path = saved.directory / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.secret.weight": torch.ones(3)}, path)
    with pytest.raises(WeightsError, match=r"no place for model\.layers\.0\.secret\.weight"):
        saved.load(TransformersForCausalLM)


def query(config: Any, architecture: str, **changes: Any) -> ModelQuery:
    return ModelQuery(architecture=architecture, config=config.to_dict(), **changes)


@pytest.mark.parametrize("name", SERVED)
def test_models_that_work_are_not_refused(name: str) -> None:
    from rabbet_model_transformers.build import causal_class

    config = config_of(name)
    assert TransformersForCausalLM.supports(query(config, causal_class(config).__name__)) == ()


@pytest.mark.parametrize(
    ("config", "architecture", "changes", "code"),
    [
        (transformers.BloomConfig(), "BloomForCausalLM", {}, "ATTENTION"),
        (transformers.MambaConfig(), "MambaForCausalLM", {}, "ATTENTION"),
        (transformers.LlamaConfig(), "HouseMadeForCausalLM", {}, "ARCHITECTURE"),
        (transformers.GPT2Config(), "GPT2LMHeadModel", {"tensor_parallel_size": 2}, "RANKS"),
        (transformers.GPT2Config(), "GPT2LMHeadModel", {"pipeline_parallel_size": 2}, "PIPELINE"),
        (
            transformers.LlamaConfig(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2),
            "LlamaForCausalLM",
            {},
            "LAYER_TYPES",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_code(config: Any, architecture: str, changes: Any, code: str) -> None:
    refusals = TransformersForCausalLM.supports(query(config, architecture, **changes))
    assert [refusal.code for refusal in refusals] == [code]


def test_code_that_comes_with_a_checkpoint_is_refused_wherever_it_hides() -> None:
    for config in (
        {"model_type": "house", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
        {"model_type": "house", "text_config": {"auto_map": {"AutoConfig": "configuration.Config"}}},
    ):
        refusals = TransformersForCausalLM.supports(ModelQuery(architecture="HouseForCausalLM", config=config))
        assert [refusal.code for refusal in refusals] == ["REMOTE_CODE"]
        assert "auto_map" in refusals[0].message


def test_code_beside_a_known_model_is_not_run(checkpoint: Any) -> None:
    """transformers' own class serves the model; the file next to the weights stays untouched."""
    saved = checkpoint(config_of("gpt2"))
    marker = saved.directory / "ran"
    (saved.directory / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\nclass Model: ...\n")
    saved.config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    saved.assert_equal(saved.logits(*saved.load(TransformersForCausalLM)))
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_context_past_the_first_range_of_growing_angles_is_refused(kind: str, checkpoint: Any) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    limit: dict[str, Any] = {"max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.5] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
        limit = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    name = "phi3" if kind == "longrope" else "olmo2"
    saved = checkpoint(config_of(name, rope_parameters=rope, sliding_window=None, **limit))
    with pytest.raises(ConfigError, match="--max-model-len is 64"):
        saved.load(TransformersForCausalLM)
    model, context = saved.load(TransformersForCausalLM, max_model_len=32)
    saved.assert_equal(saved.logits(model, context))


def test_linear_layers_use_the_engines_kernels(checkpoint: Any) -> None:
    from rabbet.layers import LinearBase

    model, _ = checkpoint(config_of("phi")).load(TransformersForCausalLM)
    assert not [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    assert sum(isinstance(module, LinearBase) for module in model.modules()) == 2 * 6 + 1


def test_tied_head_shares_the_embedding(checkpoint: Any) -> None:
    model, _ = checkpoint(config_of("llama")).load(TransformersForCausalLM)
    assert model.causal.lm_head.packed.data_ptr() == model.base.embed_tokens.weight.data_ptr()


def test_random_weights_give_finite_logits(checkpoint: Any) -> None:
    from rabbet.weights.dummy import fill_with_noise
    from rabbet.weights.load import finish_loading

    saved = checkpoint(config_of("gpt_neox"))
    model, context = saved.load(TransformersForCausalLM)
    fill_with_noise(model)
    finish_loading(model)
    logits = saved.logits(model, context)
    assert all(torch.isfinite(rows).all() for rows in logits)
    assert logits[0].std() > 0
