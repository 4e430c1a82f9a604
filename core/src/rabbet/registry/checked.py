"""Checked mode: every class that is loaded goes through the checkers that are installed. Off, it costs nothing."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from rabbet.errors import PluginError, PluginLoadError

__all__ = ["CHECKER_GROUP", "checked"]

CHECKER_GROUP = "rabbet.checker"
"""Entry points ``callable(kind, cls) -> cls``: a subclass that checks each call."""


@cache
def checked(kind: str, target: Any) -> Any:
    """The class behind all checkers; the same one each time.

    Raises:
        PluginError: If no checker is installed.
        PluginLoadError: If a checker fails, or gives back what is no subclass.
    """
    points = sorted(entry_points(group=CHECKER_GROUP), key=lambda point: point.name)
    if not points:
        raise PluginError(
            "plugins cannot be checked (RABBET_CHECK_PLUGINS): no checker is installed; pip install rabbet-sdk"
        )
    result = target
    for point in points:
        try:
            result = point.load()(kind, result)
        except Exception as error:  # the edge of the checker
            raise PluginLoadError(
                f"the checker {point.name} failed on {kind} {target.__qualname__}: {type(error).__name__}: {error}",
                kind=kind,
            ) from error
        if not isinstance(result, type) or not issubclass(result, target):
            raise PluginLoadError(
                f"the checker {point.name} made {result!r} of {kind} {target.__qualname__}, which is no subclass",
                kind=kind,
            )
    return result
