"""Conformance suites, one class a kind: subclass one, name the plugin, run pytest."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rabbet_sdk.conformance.base import PluginConformance, SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, pending, unavailable, unclaimed, xfail

SUITES = {
    "attention": "AttentionConformance",
    "executor": "ExecutorConformance",
    "grammar": "GrammarConformance",
    "hooks": "HooksConformance",
    "kv_cache_dtype": "KVCacheDtypeConformance",
    "kv_connector": "KVConnectorConformance",
    "kv_events": "KVEventsConformance",
    "linear": "LinearConformance",
    "logits_processor": "LogitsProcessorConformance",
    "model": "ModelConformance",
    "moe": "MoEConformance",
    "platform": "PlatformConformance",
    "pooler": "PoolerConformance",
    "proposer": "ProposerConformance",
    "quantization": "QuantizationConformance",
    "reasoning_parser": "ReasoningParserConformance",
    "scheduler": "SchedulerConformance",
    "stat_logger": "StatLoggerConformance",
    "tool_parser": "ToolParserConformance",
    "weights": "WeightsConformance",
}
"""Kind to the name of its suite, which stands in the module named like the kind."""

__all__ = [
    "SUITES",
    "Case",
    "Claims",
    "PluginConformance",
    "SupportsConformance",
    "cases",
    "dangerous",
    "level",
    "pending",
    "suite_for",
    "unavailable",
    "unclaimed",
    "xfail",
]


def suite_for(kind: str) -> type[PluginConformance]:
    """The suite of a kind; imports its module only.

    Raises:
        KeyError: If no suite is known for ``kind``.
    """
    suite: type[PluginConformance] = getattr(import_module(f"{__name__}.{kind}"), SUITES[kind])
    return suite


def __getattr__(name: str) -> Any:
    """Suites by class name, imported when they are asked for: each brings its own oracles."""
    for kind, suite in SUITES.items():
        if suite == name:
            return suite_for(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
