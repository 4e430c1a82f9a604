"""Core's plain torch kernels pass the suite that linear backends are held to."""

from __future__ import annotations

from rabbet_sdk.conformance import LinearConformance


class TestTorchLinear(LinearConformance):
    plugin = "linear/torch"
