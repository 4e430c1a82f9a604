"""Contract versions: which of those that this core speaks a plugin was written for."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from rabbet.contracts.kinds import KINDS
from rabbet.errors import PluginLoadError

__all__ = ["contract_problem", "spoken", "through_adapter"]

logger = logging.getLogger(__name__)


def spoken(kind: str, declared: str) -> str | None:
    """The newest version that the core speaks and the range holds, or None. ``0.x`` must be meant exactly."""
    specifier = SpecifierSet(declared)
    for version in (KINDS[kind].version, *KINDS[kind].previous):
        major, minor = (int(part) for part in version.split("."))
        # Before 1.0 each minor may change anything, so a range that holds a neighbour means none of them.
        near = [f"0.{minor + 1}", f"0.{minor - 1}"] if major == 0 else []
        if Version(version) in specifier and not any(Version(item) in specifier for item in near if "-" not in item):
            return version
    return None


def contract_problem(kind: str, declared: str) -> str:
    """Why no version that the core speaks is in the range, and what to do; or an empty string."""
    try:
        if spoken(kind, declared) is not None:
            return ""
        specifier = SpecifierSet(declared)
    except InvalidSpecifier:
        return f"for contract {declared!r}, which is no version range; write one such as >={KINDS[kind].version}"
    current = KINDS[kind].version
    versions = " and ".join((*KINDS[kind].previous, current))
    major = int(current.partition(".")[0])
    is_older = any(Version(f"{number}.{minor}") in specifier for number in range(major) for minor in range(10))
    if major == 0 and Version(current) in specifier:
        advice = f"It is provisional, so each minor is another one: declare =={current}"
    else:
        advice = "Upgrade the plugin, or install an older rabbet-core" if is_older else "Upgrade rabbet-core"
    return f"for contract {declared}; this core speaks {versions}. {advice}"


@cache
def through_adapter(kind: str, version: str, target: Any) -> Any:
    """A class of an earlier contract as one of today's; the same one each time. Told once.

    Raises:
        PluginLoadError: If it is no class of the earlier contract either.
    """
    module, _, name = KINDS[kind].adapter.partition(":")
    adapt = getattr(import_module(module), name)
    try:
        adapted = adapt(target)
    except TypeError as error:
        raise PluginLoadError(
            f"{kind} {target.__qualname__} does not fit contract {version}: {error}", kind=kind
        ) from error
    logger.warning(
        "%s %s.%s is written for contract %s and runs through an adapter; docs/migrations/%s-%s.md says what to change",
        kind, target.__module__, target.__qualname__, version, kind, KINDS[kind].version.partition(".")[0],
    )  # fmt: skip
    return adapted
