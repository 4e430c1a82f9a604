"""Logits of small random Llama and Mistral models are those of transformers; wrong checkpoints are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from rabbet_model_llama.model import LlamaForCausalLM, MistralForCausalLM
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig

from rabbet.contracts.model import ModelQuery
from rabbet.errors import ConfigError, WeightsError
from rabbet.layers.reference import TorchLinearBackend

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one key head": {"num_key_value_heads": 1},
    "own head size": {"head_dim": 16},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "yarn rope": {"rope_parameters": YARN},
    "llama3 rope": {"rope_parameters": LLAMA3},
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(SMALL | changes))


class CopyingBackend(TorchLinearBackend):
    """Packs into another tensor, as kernels with their own layout do."""

    def pack(self, weight_OI: torch.Tensor) -> Any:
        return (weight_OI.clone(),)

    def apply(self, x_TI: torch.Tensor, packed: Any, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(x_TI, packed[0], bias_O)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_whole_and_in_chunks(variant: str, checkpoint: Any) -> None:
    saved = checkpoint(llama(**VARIANTS[variant]))
    model, context = saved.load(LlamaForCausalLM)
    for chunk in (64, 1, 4):
        saved.assert_equal(saved.logits(model, context, chunk))


@pytest.mark.parametrize("window", [None, 4, 16])
def test_mistral_looks_back_as_far_as_its_window(window: int | None, checkpoint: Any) -> None:
    saved = checkpoint(MistralConfig(**(SMALL | {"sliding_window": window, "head_dim": 8})))
    model, context = saved.load(MistralForCausalLM)
    assert {layer.spec.window for layer in context.attention_layers.values()} == {window}
    for chunk in (64, 3):
        saved.assert_equal(saved.logits(model, context, chunk))


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("variant", ["tied", "biases"])
def test_ranks_add_up_to_one(variant: str, size: int, checkpoint: Any, ranks: Any) -> None:
    """3 key heads, 50 inner and 99 rows over 2, 3, 4 (padded: 1 of 4 ranks has none) and 6 ranks (heads copied)."""
    heads = {"num_key_value_heads": 3} if size in (2, 3, 6) else {"num_key_value_heads": 6}
    saved = checkpoint(llama(**VARIANTS[variant], **heads))
    results = ranks(size).run(lambda state: saved.logits(*saved.load(LlamaForCausalLM, state), chunk=5))
    for logits in results:
        saved.assert_equal(logits)


def test_heads_that_fit_no_rank_are_refused(checkpoint: Any, ranks: Any) -> None:
    saved = checkpoint(llama())
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 4"):
        ranks(4).run(lambda state: saved.load(LlamaForCausalLM, state))


def test_checkpoint_in_several_files_loads(checkpoint: Any) -> None:
    saved = checkpoint(llama(), shard_size="30KB")
    assert len(list(saved.directory.glob("*.safetensors"))) > 2
    saved.assert_equal(saved.logits(*saved.load(LlamaForCausalLM)))


def test_packed_weights_replace_dense_ones_and_can_be_loaded_again(checkpoint: Any) -> None:
    saved = checkpoint(llama(tie_word_embeddings=True, attention_bias=True))
    model, context = saved.load(LlamaForCausalLM, linear=CopyingBackend())
    dense = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    assert dense == ["model.embed_tokens.weight"]
    saved.assert_equal(saved.logits(model, context))
    tensors = load_file(saved.directory / "model.safetensors")
    doubled = {name: tensor * 2 for name, tensor in tensors.items()}
    from rabbet.weights.load import load_weights

    rules = LlamaForCausalLM.weight_rules(saved.config)
    load_weights(model, rules, doubled.items())
    assert (saved.logits(model, context)[0] - saved.expected[0]).abs().max() > 1
    load_weights(model, rules, tensors.items())
    saved.assert_equal(saved.logits(model, context))


def test_tied_head_shares_the_embedding(checkpoint: Any) -> None:
    model, _ = checkpoint(llama(tie_word_embeddings=True)).load(LlamaForCausalLM)
    embedding = model.model.embed_tokens
    assert model.lm_head is None
    assert embedding.packed.data_ptr() == embedding.weight.data_ptr()


def damage(saved: Any, name: str, change: Any) -> None:
    path = saved.directory / "model.safetensors"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.self_attn.k_proj.weight", None),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("model.norm.weight", None),
        ("model.layers.1.self_attn.q_proj.weight", lambda t: t[:-8]),
        ("model.layers.1.self_attn.v_proj.weight", lambda t: torch.cat((t, t))),
        ("model.layers.2.mlp.gate_proj.weight", lambda t: torch.cat((t, t))),
        ("model.layers.2.mlp.gate_proj.weight", lambda t: t[:25]),
        ("model.layers.0.mlp.down_proj.weight", lambda t: t[:, :25]),
        ("model.layers.0.mlp.down_proj.weight", lambda t: torch.cat((t, t), dim=1)),
        ("model.layers.0.self_attn.o_proj.weight", lambda t: t[:10]),
        ("model.layers.0.self_attn.o_proj.weight", lambda t: t[:, 0]),
        ("model.embed_tokens.weight", lambda t: t[:98]),
        ("lm_head.weight", lambda t: torch.cat((t, t[:1]))),
        ("model.norm.weight", lambda t: t[:47]),
        ("model.layers.0.mlp.down_proj.weight", lambda t: t.to(torch.int8)),
    ],
)
def test_missing_misshapen_or_integer_tensor_is_named(name: str, change: Any, checkpoint: Any) -> None:
    saved = checkpoint(llama())
    damage(saved, name, change)
    part = {"k_proj": "qkv_proj", "up_proj": "gate_up_proj"}
    shown = name if change is not None else next((b for a, b in part.items() if a in name), name)
    with pytest.raises(WeightsError, match=shown.replace(".", r"\.")):
        saved.load(LlamaForCausalLM)


def test_unexpected_tensor_is_named(checkpoint: Any) -> None:
    saved = checkpoint(llama())
    path = saved.directory / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, path)
    with pytest.raises(WeightsError, match=r"no place for model\.layers\.0\.self_attn\.q_norm\.weight"):
        saved.load(LlamaForCausalLM)


def test_second_head_of_a_tied_checkpoint_is_left_alone(checkpoint: Any) -> None:
    saved = checkpoint(llama(tie_word_embeddings=True))
    path = saved.directory / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": torch.zeros(99, 48)}, path)
    saved.assert_equal(saved.logits(*saved.load(LlamaForCausalLM)))


@pytest.mark.parametrize(
    ("config", "sizes", "code"),
    [
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, {}, "ROPE"),
        ({"rope_parameters": {"rope_type": "longrope"}}, {}, "ROPE"),
        ({"hidden_act": "gelu"}, {}, "ACTIVATION"),
        ({}, {"pipeline_parallel_size": 2}, "PIPELINE"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, {}, "HEADS"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, {"tensor_parallel_size": 4}, "HEADS"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_code(config: Any, sizes: Any, code: str) -> None:
    values = json.loads(llama().to_json_string()) | config
    refusals = LlamaForCausalLM.supports(ModelQuery(architecture="LlamaForCausalLM", config=values, **sizes))
    assert [refusal.code for refusal in refusals] == [code]


def test_plain_model_is_not_refused() -> None:
    values = json.loads(llama().to_json_string())
    assert LlamaForCausalLM.supports(ModelQuery(architecture="LlamaForCausalLM", config=values)) == ()


def test_embeddings_in_place_of_ids_give_the_same_and_are_left_alone(checkpoint: Any) -> None:
    saved = checkpoint(llama())
    model, context = saved.load(LlamaForCausalLM)
    from rabbet.layers import ForwardContext, set_forward_context

    ids, positions = saved.texts[0], torch.arange(len(saved.texts[0]))
    with torch.inference_mode(), set_forward_context(ForwardContext()):
        embeds = model.model.embed_tokens(ids)
        before = embeds.clone()
        assert torch.equal(model(None, positions, inputs_embeds=embeds), model(ids, positions))
    assert torch.equal(embeds, before)
    assert len(context.attention_layers) == 3
