"""Which plugins the operator allows, prefers and lets override others."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rabbet.errors import PluginPolicyError
from rabbet.registry.names import nearest

__all__ = ["PluginPolicy", "canonical_distribution"]


def canonical_distribution(name: str) -> str:
    """A distribution's name as PyPA's specifications compare it."""
    return name.strip().casefold().replace("_", "-").replace(".", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginPolicy:
    """The operator's rules.

    Attributes:
        allow: Only what matches is seen; empty allows all. Entries are names, ``kind/name``, distributions or globs.
        deny: What matches is not seen; wins over ``allow``.
        mode: ``all``, or ``bundled``: only the project's own distributions.
        prefer: ``kind/name`` to the distribution that wins where two provide the name.
        override: ``kind/name`` to the distribution whose declared replacement takes effect.
        is_strict: A plugin that "auto" had to pass over is an error, unless it is for other hardware.
        auto: ``bundled``: "auto" takes only the project's own and certified ones; ``any``: everybody's.
        files: One-file plugins to load, by path.
        locked: A lock file that what is installed has to equal; empty for none.
        certificates: Directory of the operator's certificates.
        import_timeout_s: Seconds that the import of a one-file plugin may take.
        is_checked: Each call of a plugin goes through the installed checkers.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    mode: str = "all"
    prefer: Mapping[str, str] = field(default_factory=dict)
    override: Mapping[str, str] = field(default_factory=dict)
    is_strict: bool = False
    auto: str = "bundled"
    files: tuple[str, ...] = ()
    locked: str = ""
    certificates: str = "~/.config/rabbet/certificates"
    import_timeout_s: float = 300.0
    is_checked: bool = False

    def denies(self, kind: str, name: str, distribution: str, *, is_bundled: bool) -> str | None:
        """The rule that hides a contribution, or None."""
        for entry in self.deny:
            if matches(entry, kind, name, distribution):
                return f"denied by --plugins-deny {entry.strip()}"
        if self.mode == "bundled" and not is_bundled:
            return "denied by --plugins bundled: not one of the project's own distributions"
        # Core's own parts are not subject to an allow list: it is about plugins.
        if self.allow and canonical_distribution(distribution) != "rabbet-core":
            if not any(matches(entry, kind, name, distribution) for entry in self.allow):
                return "not in --plugins-allow"
        return None

    def check(self, known: Iterable[tuple[str, str, str]]) -> None:
        """Refuse entries that match nothing that is installed: a typo must not pass for a rule.

        Args:
            known: Kind, name and distribution of each contribution.

        Raises:
            PluginPolicyError: Naming the entry and what is near it.
        """
        contributions = list(known)
        words = sorted({word for k, n, d in contributions for word in (n, f"{k}/{n}", canonical_distribution(d))})
        for option, entries in (("--plugins-allow", self.allow), ("--plugins-deny", self.deny)):
            for entry in entries:
                if not any(matches(entry, *contribution) for contribution in contributions):
                    close = nearest(entry.strip(), words)
                    hint = f"; did you mean {' or '.join(close)}?" if close else ""
                    raise PluginPolicyError(f"{option} {entry.strip()!r} matches no installed plugin{hint}")


def matches(entry: str, kind: str, name: str, distribution: str) -> bool:
    """Whether a rule's entry names this contribution."""
    pattern = entry.strip().casefold()
    owner = canonical_distribution(distribution)
    plain = name.casefold()
    candidates = (plain, f"{kind}/{plain}", owner, f"{owner}:{plain}")
    return any(
        fnmatch.fnmatchcase(candidate, pattern) or fnmatch.fnmatchcase(candidate, pattern.replace("-", "_"))
        for candidate in candidates
    ) or fnmatch.fnmatchcase(owner, canonical_distribution(pattern))
