"""The standard suite on the platform of this distribution."""

from __future__ import annotations

from rabbet_sdk.conformance import PlatformConformance


class TestCpuPlatform(PlatformConformance):
    plugin = "platform/cpu"
