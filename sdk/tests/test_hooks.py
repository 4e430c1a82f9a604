"""The suite of hook plugins on the twin and on the SDK's own."""

from __future__ import annotations

from rabbet_sdk.conformance import HooksConformance


class TestStrict(HooksConformance):
    plugin = "hooks/strict"


class TestSdk(HooksConformance):
    plugin = "hooks/sdk"
