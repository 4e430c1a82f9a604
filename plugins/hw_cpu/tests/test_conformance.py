"""The standard suites on the backends of this distribution."""

from __future__ import annotations

from rabbet_sdk.conformance import AttentionConformance


class TestCpuAttention(AttentionConformance):
    plugin = "attention/cpu"
