"""The standard suite on the architectures of this distribution."""

from __future__ import annotations

from rabbet_sdk.conformance import ModelConformance

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
"""Divided by two and by four ranks."""


class TestQwen2(ModelConformance):
    plugin = "model/Qwen2ForCausalLM"
    model_type = "qwen2"
    config = {**ModelConformance.config, **HEADS}


class TestQwen3(ModelConformance):
    plugin = "model/Qwen3ForCausalLM"
    model_type = "qwen3"
    config = {**ModelConformance.config, **HEADS, "head_dim": 16}
