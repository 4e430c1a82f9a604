"""The catalog: every contribution that is installed or staged, with its state, under the operator's policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rabbet.contracts.kinds import KINDS
from rabbet.contracts.registration import Registration, normalise_name, registrations_of, staged_registrations
from rabbet.errors import DuplicatePluginError, PluginPolicyError, UnknownPluginError
from rabbet.registry.discover import discover
from rabbet.registry.entry import Entry, State
from rabbet.registry.known import install_hint
from rabbet.registry.lock import require_locked
from rabbet.registry.names import nearest
from rabbet.registry.onefile import MODULE_PREFIX, stage_file
from rabbet.registry.policy import PluginPolicy, canonical_distribution

__all__ = ["Catalog"]

_PROCESS = "(this process)"
_TOMBSTONES: Mapping[tuple[str, str], str] = {}
"""Names that moved out of core: (kind, name) to the sentence that says where to."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Contributions by kind and name. Made for one engine; holds no global state."""

    entries: tuple[Entry, ...]
    policy: PluginPolicy = field(default_factory=PluginPolicy)
    problems: tuple[str, ...] = ()

    @classmethod
    def scan(cls, policy: PluginPolicy | None = None, *, path: Sequence[str] | None = None) -> Catalog:
        """Read what is installed; import nothing but the one-file plugins that the policy names.

        Raises:
            PluginPolicyError: If a rule matches nothing, or what is installed is not what was locked.
        """
        policy = policy or PluginPolicy()
        found = discover(path)
        if policy.locked:
            require_locked(Path(policy.locked), found.entries, policy.files)
        for file in policy.files:
            stage_file(Path(file), limit_s=policy.import_timeout_s)
        entries = [*found.entries, *_staged(found.entries)]
        policy.check((entry.kind, entry.name, entry.distribution) for entry in entries)
        for rules, option in ((policy.prefer, "--plugin-prefer"), (policy.override, "--plugin-override")):
            for target, owner in rules.items():
                if not any(canonical_distribution(owner) == canonical_distribution(e.distribution) for e in entries):
                    raise PluginPolicyError(f"{option} {target}={owner}: no distribution {owner!r} is installed")
        return cls(tuple(_judge(entry, policy) for entry in entries), policy, found.problems)

    @classmethod
    def of(cls, classes: Mapping[str, Mapping[str, type]], policy: PluginPolicy | None = None) -> Catalog:
        """A catalog of given classes, kind to name to class; for tests."""
        entries = [
            Entry(
                kind=kind,
                name=normalise_name(kind, name),
                distribution=_PROCESS,
                version="",
                value=f"{target.__module__}:{target.__qualname__}",
                record=next((r for r in registrations_of(target) if r.kind == kind), None)
                or _record(kind, name, target),
                is_bundled=True,
            )
            for kind, members in classes.items()
            for name, target in members.items()
        ]
        return cls(tuple(entries), policy or PluginPolicy())

    def of_kind(self, kind: str) -> tuple[Entry, ...]:
        """All entries of a kind, likeliest for "auto" first."""
        entries = [entry for entry in self.entries if entry.kind == kind]
        return tuple(sorted(entries, key=lambda entry: (-entry.priority, entry.name, entry.distribution)))

    def names(self, kind: str) -> tuple[str, ...]:
        """Names that could be chosen, likeliest first."""
        hidden = (State.DENIED, State.INCOMPATIBLE)
        return tuple(dict.fromkeys(entry.name for entry in self.of_kind(kind) if entry.state not in hidden))

    def find(self, kind: str, name: str) -> Entry:
        """The one entry that ``name`` means: a name, an alias, or ``distribution:name``.

        Raises:
            UnknownPluginError: With the nearest names and all usable ones.
            DuplicatePluginError: If two distributions provide it and no preference decides.
        """
        owner, colon, bare = name.rpartition(":")
        wanted = normalise_name(kind, bare)
        found = [entry for entry in self.entries if entry.kind == kind and entry.name == wanted]
        if not found:
            found = [e for e in self.entries if e.kind == kind and e.provided and wanted in e.provided.aliases]
        if colon:
            found = [e for e in found if canonical_distribution(e.distribution) == canonical_distribution(owner)]
        if not found:
            raise self._unknown(kind, name)
        allowed = [entry for entry in found if entry.state is not State.DENIED] or found
        return allowed[0] if len(allowed) == 1 else self._decide(kind, wanted, allowed)

    def _decide(self, kind: str, name: str, entries: Sequence[Entry]) -> Entry:
        preferred = self.policy.prefer.get(f"{kind}/{name}") or self.policy.override.get(f"{kind}/{name}")
        if preferred:
            wanted = canonical_distribution(preferred)
            for entry in entries:
                if canonical_distribution(entry.distribution) == wanted:
                    return entry
        entries = sorted(entries, key=lambda entry: entry.distribution)
        owners = " and ".join(entry.label for entry in entries)
        last = entries[-1].distribution
        raise DuplicatePluginError(
            f"{kind}/{name} is provided by {owners}. Uninstall one, deny one (--plugins-deny {last}), or choose "
            f"(--plugin-prefer {kind}/{name}={last})",
            kind=kind,
            name=name,
        )

    def _unknown(self, kind: str, name: str) -> UnknownPluginError:
        wanted = normalise_name(kind, name.rpartition(":")[2])
        if (moved := _TOMBSTONES.get((kind, wanted))) is not None:
            return UnknownPluginError(f"{kind} {name!r} {moved}", kind=kind, name=wanted)
        names = self.names(kind)
        close = nearest(wanted, names)
        parts = [f"{KINDS[kind].chosen_by}: there is no {kind} plugin named {name!r}"]
        if close:
            parts.append(f"did you mean {' or '.join(close)}?")
        parts.append(f"installed: {', '.join(names) or 'none'}")
        if hint := install_hint(kind, wanted):
            parts.insert(1, f"needs {kind} {wanted!r}: {hint}")
        else:
            parts.append("install the distribution that provides it (pip install ...), and see: rabbet plugins list")
        return UnknownPluginError("; ".join(parts), kind=kind, name=wanted)


def _record(kind: str, name: str, target: type) -> Registration:
    return Registration(
        kind=kind,
        name=normalise_name(kind, name),
        contract=KINDS[kind].version,
        module=target.__module__,
        qualname=target.__qualname__,
        target=target,
    )


def _staged(known: Sequence[Entry]) -> list[Entry]:
    """Classes that this process decorated itself and that no distribution's entry point names."""
    values = {(entry.kind, entry.value) for entry in known}
    entries = []
    for record in staged_registrations():
        value, is_file = f"{record.module}:{record.qualname}", record.module.startswith(MODULE_PREFIX)
        if (record.kind, value) not in values:
            entries.append(
                Entry(
                    kind=record.kind,
                    name=record.name,
                    distribution=_PROCESS,
                    version="",
                    value=value,
                    state=State.UNDECLARED,
                    reason="registered by this process; chosen by name only",
                    record=record,
                    file=Path(str(sys.modules[record.module].__file__)) if is_file else None,
                )
            )
    return entries


def _judge(entry: Entry, policy: PluginPolicy) -> Entry:
    reason = policy.denies(entry.kind, entry.name, entry.distribution, is_bundled=entry.is_bundled)
    entry = replace(entry, is_checked=True) if policy.is_checked else entry
    return entry if reason is None else replace(entry, state=State.DENIED, reason=reason)
