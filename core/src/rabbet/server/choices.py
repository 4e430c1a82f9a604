"""The plugins that the server itself uses: parsers of model text, listeners to numbers."""

from __future__ import annotations

from typing import Any

from rabbet.config.schema import EngineConfig, ServerConfig
from rabbet.contracts.observability import StatLogger
from rabbet.errors import PluginLoadError, RabbetError
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


def stat_loggers_of(engine: EngineConfig, catalog: Catalog) -> dict[str, StatLogger]:
    """The stat loggers that the operator named, made, by name and owner.

    Raises:
        PluginError: If one is unknown or cannot be used.
    """
    return dict(_stat_logger(engine, catalog, name) for name in engine.observability.stat_loggers)


def _stat_logger(engine: EngineConfig, catalog: Catalog, name: str) -> tuple[str, StatLogger]:
    decision = select(catalog, "stat_logger", name=name, asked_by="--stat-loggers")
    target = compose([decision]).load("stat_logger")
    try:
        return f"{name} of {decision.distribution} {decision.version}".strip(), target(engine)
    except RabbetError:
        raise
    except (Exception, SystemExit) as error:  # the edge of the plugin
        raise PluginLoadError(
            f"--stat-loggers {name}: it cannot be made: {type(error).__name__}: {error}", kind="stat_logger", name=name
        ) from error


def _chosen(catalog: Catalog, kind: str, name: str | None, option: str) -> Any:
    if name is None:
        return None
    return compose([select(catalog, kind, name=name, asked_by=option)]).load(kind)
