"""One contribution of one distribution, as discovery sees it: no import, only metadata."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path

from rabbet.contracts.kinds import KINDS
from rabbet.contracts.registration import Registration
from rabbet.registry.manifest import Provided
from rabbet.registry.versions import spoken

__all__ = ["Entry", "State"]


class State(str, Enum):
    """How far a contribution came, or why it stopped."""

    FOUND = "found"
    ALLOWED = "allowed"
    COMPATIBLE = "compatible"
    LOADED = "loaded"
    USABLE = "usable"
    CHOSEN = "chosen"
    DENIED = "denied"
    SHADOWED = "shadowed"
    UNDECLARED = "undeclared"
    INCOMPATIBLE = "incompatible"
    ABSENT = "absent"
    BROKEN = "broken"
    REFUSED = "refused"
    TAMPERED = "tampered"
    NOT_NEEDED = "not needed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A contribution.

    Attributes:
        kind: Kind of plugin.
        name: Normalised name.
        distribution: Name of the distribution, or ``(this process)`` for staged classes, or the file of a
            one-file plugin.
        version: Version of the distribution.
        value: ``module:qualname``.
        entry_point: What is loaded; None for staged classes and one-file plugins.
        provided: Its table in the manifest, or None.
        state: Furthest state without importing.
        reason: Why it stopped there.
        is_bundled: The distribution is one of the project's own.
        record: For staged classes: the decorator's record.
        file: For one-file plugins.
        is_checked: Each call goes through the installed checkers.
    """

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    entry_point: EntryPoint | None = None
    provided: Provided | None = None
    state: State = State.COMPATIBLE
    reason: str = ""
    is_bundled: bool = False
    record: Registration | None = None
    file: Path | None = None
    is_checked: bool = False

    @property
    def priority(self) -> int:
        """Rank for "auto": bundled 50 to 99, outsiders at most 49."""
        value = self.provided.priority if self.provided else 0
        return value if self.is_bundled else min(value, 49)

    @property
    def contract(self) -> str:
        """The contract version under which it is used."""
        declared = self.provided.contract if self.provided else None
        given = self.record.contract if self.record else KINDS[self.kind].version
        return (spoken(self.kind, declared) if declared else None) or given

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip()
