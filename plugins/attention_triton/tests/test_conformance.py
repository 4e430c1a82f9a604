"""The standard suite, on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from rabbet_sdk.conformance import AttentionConformance


class TestTritonAttention(AttentionConformance):
    plugin = "attention/triton"
    device = "cuda"
