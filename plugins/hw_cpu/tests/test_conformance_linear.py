"""The standard suite on the linear backend of this distribution."""

from __future__ import annotations

from rabbet_sdk.conformance import LinearConformance


class TestCpuLinear(LinearConformance):
    plugin = "linear/cpu"
