"""Core's plain torch experts pass the suite that expert backends are held to."""

from __future__ import annotations

from rabbet_sdk.conformance import MoEConformance


class TestTorchExperts(MoEConformance):
    plugin = "moe/torch"
