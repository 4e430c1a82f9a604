"""Conformance suites, one class a kind: subclass one, name the plugin, run pytest."""

from rabbet_sdk.conformance.base import PluginConformance, SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, pending, unavailable, unclaimed, xfail

__all__ = [
    "Case",
    "Claims",
    "PluginConformance",
    "SupportsConformance",
    "cases",
    "dangerous",
    "level",
    "pending",
    "unavailable",
    "unclaimed",
    "xfail",
]
