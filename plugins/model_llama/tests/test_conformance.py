"""The standard suite on the architectures of this distribution."""

from __future__ import annotations

from rabbet_sdk.conformance import ModelConformance

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
"""Divided by two and by four ranks."""


class TestLlama(ModelConformance):
    plugin = "model/LlamaForCausalLM"
    config = {**ModelConformance.config, **HEADS}


class TestMistral(ModelConformance):
    plugin = "model/MistralForCausalLM"
    model_type = "mistral"
    config = {**ModelConformance.config, **HEADS, "head_dim": 8, "sliding_window": 6}
