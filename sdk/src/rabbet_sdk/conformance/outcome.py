"""Outcomes of a conformance test beside pass and fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

# ``pytest.skip.Exception`` is this class; type checkers know it by this name only.
from _pytest.outcomes import Skipped

__all__ = [
    "ExpectedFailure",
    "Unavailable",
    "Unclaimed",
    "dangerous",
    "level",
    "pending",
    "unavailable",
    "unclaimed",
    "xfail",
]

_F = TypeVar("_F", bound=Callable[..., Any])


class Unclaimed(Skipped):
    """The manifest does not claim the case. Counted apart; never a pass."""


class Unavailable(Skipped):
    """The case is claimed, but this machine cannot run it. Counted apart; never a pass."""


def unclaimed(reason: str) -> NoReturn:
    """End the test: the plugin does not claim this."""
    raise Unclaimed(f"unclaimed: {reason}")


def unavailable(reason: str) -> NoReturn:
    """End the test: this machine lacks what it needs."""
    raise Unavailable(f"unavailable: {reason}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedFailure:
    """A known defect of a plugin.

    Attributes:
        reason: An issue's number or address.
        until: Version of the plugin's distribution from which the failure is no longer excused.
    """

    reason: str
    until: str


def xfail(reason: str, *, until: str) -> ExpectedFailure:
    """A value for ``expected_failures``; a test that passes in spite of it fails, and so does an expired one."""
    if not reason.strip():
        raise ValueError("xfail needs a reason: the number or the address of an issue")
    return ExpectedFailure(reason=reason, until=until)


def dangerous(test: _F) -> _F:
    """Mark a test that may crash or hang: it runs in a child process, together with its class's other such tests."""
    test.__rabbet_dangerous__ = True  # type: ignore[attr-defined]
    return test


def level(number: int) -> Callable[[_F], _F]:
    """Mark a test's level: 1 contract, 2 numerics, 3 state and faults, 4 engine end to end, 5 performance."""

    def mark(test: _F) -> _F:
        test.__rabbet_level__ = number  # type: ignore[attr-defined]
        return test

    return mark


def pending(since: str) -> Callable[[_F], _F]:
    """Mark a test that is new in ``since`` (a suite version): reported, but its failure counts from the next minor."""

    def mark(test: _F) -> _F:
        test.__rabbet_pending__ = since  # type: ignore[attr-defined]
        return test

    return mark
