"""The standard suite on three architectures that no other plugin has."""

from __future__ import annotations

from rabbet_sdk.conformance import ModelConformance


class TestGPTNeoX(ModelConformance):
    plugin = "model/*"
    architecture = "GPTNeoXForCausalLM"
    model_type = "gpt_neox"


class TestGPT2(ModelConformance):
    plugin = "model/*"
    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    config = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "bos_token_id": None,
              "eos_token_id": 2, "tie_word_embeddings": True}  # fmt: skip


class TestOlmo2(ModelConformance):
    plugin = "model/*"
    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    config = {**ModelConformance.config, "pad_token_id": None}
