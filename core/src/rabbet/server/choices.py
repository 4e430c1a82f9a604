"""The plugins that the server itself uses: parsers of model text, listeners to numbers."""

from __future__ import annotations

from typing import Any

from rabbet.config.schema import EngineConfig, ServerConfig
from rabbet.contracts.observability import StatLogger
from rabbet.registry import Catalog, compose, select
from rabbet.server.parsing import Parsers

__all__ = ["parsers_of", "stat_loggers_of"]


def parsers_of(server: ServerConfig, catalog: Catalog) -> Parsers:
    """The parsers that the operator named.

    Raises:
        PluginError: If one is unknown or cannot be used.
    """
    return Parsers(
        tools=_chosen(catalog, "tool_parser", server.tool_call_parser, "--tool-call-parser"),
        reasoning=_chosen(catalog, "reasoning_parser", server.reasoning_parser, "--reasoning-parser"),
        is_auto_allowed=server.enable_auto_tool_choice,
    )


def stat_loggers_of(engine: EngineConfig, catalog: Catalog) -> tuple[StatLogger, ...]:
    """The stat loggers that the operator named, made.

    Raises:
        PluginError: If one is unknown or cannot be used.
    """
    names = engine.observability.stat_loggers
    return tuple(_chosen(catalog, "stat_logger", name, "--stat-loggers")(engine) for name in names)


def _chosen(catalog: Catalog, kind: str, name: str | None, option: str) -> Any:
    if name is None:
        return None
    return compose([select(catalog, kind, name=name, asked_by=option)]).load(kind)
