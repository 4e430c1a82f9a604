"""Cases of a suite: what the contract allows, each marked by whether the plugin's manifest claims it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

__all__ = ["Case", "Claims", "cases"]

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One parameter of a test.

    Attributes:
        id: Short name, part of the test's id.
        value: What the test gets to work with; a dataclass of the suite.
        unclaimed: Why the manifest does not claim it; empty where it does.
    """

    id: str
    value: Any
    unclaimed: str = ""


@dataclass(frozen=True, slots=True)
class Claims:
    """The ``[provides.claims]`` table of a manifest."""

    table: Mapping[str, Sequence[Any]]

    def values(self, key: str) -> tuple[Any, ...]:
        """What is claimed for ``key``; empty where nothing is said."""
        return tuple(self.table.get(key, ()))

    def allows(self, key: str, value: Any) -> bool:
        """Whether ``value`` is claimed. A key that the manifest leaves out restricts nothing."""
        claimed = self.table.get(key)
        return claimed is None or any(
            value == item or (isinstance(item, str) and fnmatchcase(str(value), item)) for item in claimed
        )

    def has(self, feature: str) -> bool:
        """Whether ``feature`` stands in ``features``; a feature has to be named to be claimed."""
        return feature in self.values("features")

    def missing(self, facts: Mapping[str, Any], features: Iterable[str] = ()) -> str:
        """What of ``facts`` (claim key to value) and ``features`` is not claimed, for messages; empty: all is."""
        reasons = [f"{key} {value}" for key, value in facts.items() if not self.allows(key, value)]
        reasons += [f"feature {feature}" for feature in features if not self.has(feature)]
        return ", ".join(reasons)


def cases(source: str, *, every: bool = False) -> Callable[[_F], _F]:
    """Run a test once for each ``Case`` of the class method ``source(claims: Claims)``, as its argument ``case``.

    Args:
        source: Name of the class method.
        every: Unclaimed cases reach the test too; otherwise they end as "unclaimed".
    """

    def mark(test: _F) -> _F:
        test.__rabbet_cases__ = (source, every)  # type: ignore[attr-defined]
        return test

    return mark
