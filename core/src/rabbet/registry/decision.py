"""What was chosen for a kind, what was passed over, and why."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decision", "Rejection"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A candidate that was not taken.

    Attributes:
        name: Name of the candidate.
        distribution: Its owner and version.
        priority: Its rank.
        state: Where it stopped, as in ``State``.
        reasons: Each reason, one line.
    """

    name: str
    distribution: str
    priority: int
    state: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The outcome for one kind in one scope.

    Attributes:
        kind: Kind of plugin.
        scope: ``target``, ``drafter``, ``encoder`` or a cache group.
        name: The chosen name.
        value: ``module:qualname`` of the class.
        distribution: Owner.
        version: Owner's version.
        contract: Contract version under which it is used; one of the major before goes through an adapter.
        priority: Rank of the chosen one.
        asked_by: The option or fact that chose, or ``auto``.
        rejected: The others.
        file: Path of a one-file plugin, or an empty string.
        is_checked: Each call goes through the installed checkers.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    contract: str
    scope: str = "target"
    priority: int = 0
    asked_by: str = "auto"
    rejected: tuple[Rejection, ...] = ()
    file: str = ""
    is_checked: bool = False

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def lines(self) -> tuple[str, ...]:
        """The decision for people: one line for the choice, one for each candidate that was passed over."""
        head = f"{self.kind:<12} {self.scope:<8} ->  {self.name:<14} {self.label}, contract {self.contract}, {self.asked_by}"
        rows = [
            f"   {item.priority:>2} {item.name:<14} {item.state:<10} {'; '.join(item.reasons)}".rstrip()
            for item in self.rejected
        ]
        return (head, *rows)
