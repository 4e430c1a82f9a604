"""Loads one named entry point through stevedore, and nothing else.

stevedore would read its own cache on disk, which loses the distribution and misses quick edits. Its in-memory cache
is seeded with the one entry point that was resolved, so that owner and version survive and nothing else is imported.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint
from typing import Any

from stevedore.driver import DriverManager
from stevedore.exception import NoMatches
from stevedore.extension import ExtensionManager

__all__ = ["load_entry_point"]

# DriverManager does not hand on its callback for missing entry points, and would warn of what our error says better.
logging.getLogger("stevedore.named").setLevel(logging.ERROR)


def load_entry_point(entry_point: EntryPoint) -> Any:
    """Import what ``entry_point`` names and return it. Whatever the import raises comes out unchanged."""
    failures: list[BaseException] = []

    def remember(_manager: Any, _entry_point: Any, error: BaseException) -> None:
        failures.append(error)

    # A group of its own for each load: stevedore caches by group, and two loads must not see each other's seed.
    namespace = f"{entry_point.group}:{entry_point.name}:{entry_point.value}"
    ExtensionManager.ENTRY_POINT_CACHE[namespace] = [entry_point]
    try:
        manager = DriverManager(namespace, entry_point.name, on_load_failure_callback=remember)
    except NoMatches:
        # The import failed, so the manager holds nothing: what was raised there is the news.
        if failures:
            raise failures[0] from None
        raise
    finally:
        ExtensionManager.ENTRY_POINT_CACHE.pop(namespace, None)
    return manager.driver
