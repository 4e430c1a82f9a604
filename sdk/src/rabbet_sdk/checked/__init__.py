"""Checked mode: what ``RABBET_CHECK_PLUGINS=1`` puts between core and every plugin.

Each class that is loaded is replaced by a subclass that checks the calls of its contract: their order, the types of
arguments and results, and the rules of its kind (shapes, unchanged inputs, no NaN, memory that is not the plugin's).
Outputs are poisoned before the call where the contract lets them hold anything. Off, core holds the class itself.
"""

from __future__ import annotations

from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.contracts.registration import registrations_of
from rabbet_sdk.checked.proxy import ContractViolation, checked_subclass

__all__ = ["ContractViolation", "check"]


def check(kind: str, cls: type[Any]) -> type[Any]:
    """The checker, as core's group ``rabbet.checker`` asks for it.

    Args:
        kind: Kind of plugin.
        cls: Class of the plugin.
    """
    name = next((record.name for record in registrations_of(cls) if record.kind == kind), cls.__qualname__)
    return checked_subclass(cls, KINDS[kind].base, label=f"{kind}/{name}")
