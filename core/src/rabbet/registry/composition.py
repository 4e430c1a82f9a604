"""The composition: exactly which classes serve, decided by one process and checked by every other one."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rabbet.errors import CompositionMismatchError, PluginError, PluginLoadError, PluginPolicyError
from rabbet.registry.checked import checked
from rabbet.registry.decision import Decision
from rabbet.registry.loader import call, expect, resolve_watched, verify_class
from rabbet.registry.onefile import stage_file
from rabbet.registry.tamper import evidence, watch

__all__ = ["Composition", "compose", "source_hash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """Decisions and what they were made of.

    Attributes:
        decisions: One for each kind and scope.
        parts: For each decision: ``kind/name``, owner, version, hash of the class's source file.
        tampered: Owner and place of each change of core that was found so far.
        digest: sha256 over the parts and the changes: equal digests, equal code.
    """

    decisions: tuple[Decision, ...]
    parts: tuple[tuple[str, str, str, str], ...] = ()
    digest: str = ""
    tampered: tuple[tuple[str, str], ...] = ()

    def get(self, kind: str, scope: str = "target") -> Decision | None:
        """The decision of a kind, or None if it was not needed."""
        return next((item for item in self.decisions if (item.kind, item.scope) == (kind, scope)), None)

    def name(self, kind: str, scope: str = "target") -> str | None:
        """The chosen name of a kind, or None."""
        decision = self.get(kind, scope)
        return decision.name if decision else None

    def load(self, kind: str, scope: str = "target") -> type[Any]:
        """Import the class of one kind, and only that.

        Raises:
            PluginLoadError: If there is no decision, or the import fails.
        """
        decision = self.get(kind, scope)
        if decision is None:
            raise PluginLoadError(f"the composition has no {kind} for the scope {scope}", kind=kind)
        if decision.file:
            stage_file(Path(decision.file))
        try:
            target = verify_class(
                kind, decision.name, resolve_watched(decision.label, decision.value), decision.contract
            )
            if decision.is_checked:
                target = checked(kind, target)  # type: ignore[arg-type]  # classes are hashable
            return target
        except PluginError:
            raise
        except (Exception, SystemExit) as error:  # a plugin's import may raise anything
            raise PluginLoadError(
                f"{kind}/{decision.name} of {decision.label} failed to load "
                f"({decision.value}): {type(error).__name__}: {error}",
                kind=kind,
                name=decision.name,
            ) from error

    def build(self, kind: str, *arguments: Any, scope: str = "target", **named: Any) -> Any:
        """An object of the class of one kind. What its constructor changes of core is its owner's doing."""
        target = self.load(kind, scope)
        decision = self.get(kind, scope)
        assert decision is not None, "load() has found it"
        with watch(decision.label, decision.value):
            return call(decision, "__init__", target, *arguments, **named)

    def expect(self, kind: str, method: str, answer: Any, returns: Any) -> Any:
        """``registry.loader.expect`` for the plugin of a kind."""
        return expect(self.get(kind), method, answer, returns)  # type: ignore[arg-type]  # it is at work

    def settled(self, *, is_strict: bool, more: Sequence[Sequence[str]] = ()) -> Composition:
        """The same with what this process finds changed in core, and with what others found.

        Raises:
            PluginPolicyError: If anything was changed and ``is_strict``.
        """
        found = tuple(sorted({*self.tampered, *evidence(), *((owner, place) for owner, place in more)}))
        if found and is_strict:
            told = "; ".join(f"{owner} changes {place}" for owner, place in found)
            raise PluginPolicyError(f"{told}: remove what changes Rabbet itself, or leave --plugins-strict out")
        if found == self.tampered:
            return self
        return replace(self, tampered=found, digest=_digest((self.parts, found)))

    def verify(self) -> None:
        """Compare with what this process has.

        Raises:
            CompositionMismatchError: With a line for each difference.
        """
        here = tuple(_part(decision) for decision in self.decisions)
        rows = [
            f"  {mine[0]}: decided {theirs[1]} {theirs[2]} {theirs[3][:12]}, here {mine[1]} {mine[2]} {mine[3][:12]}"
            for mine, theirs in zip(here, self.parts, strict=True)
            if mine != theirs
        ]
        if rows:
            raise CompositionMismatchError("this process holds other plugins than were decided:\n" + "\n".join(rows))


def compose(decisions: Sequence[Decision]) -> Composition:
    """Freeze decisions and compute the digest."""
    parts = tuple(_part(decision) for decision in decisions)
    return Composition(decisions=tuple(decisions), parts=parts, digest=_digest(parts))


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _part(decision: Decision) -> tuple[str, str, str, str]:
    try:
        installed = version(decision.distribution)
    except PackageNotFoundError:
        installed = ""
    label = f"{decision.kind}/{decision.name}"
    return (label, decision.distribution, installed, source_hash(decision.value, decision.file))


@cache
def source_hash(value: str, file: str) -> str:
    """sha256 of the Python files of the class's package (or of its one file); empty for classes without a file."""
    if file:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    module = value.partition(":")[0]
    top = module.partition(".")[0]
    if top == "__main__":
        return ""
    loaded = sys.modules.get(top)
    origin = getattr(loaded, "__file__", None) if loaded is not None else _origin(top)
    if origin is None:
        return ""
    root = Path(origin).parent if Path(origin).name == "__init__.py" else None
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")) if root else [Path(origin)]:
        digest.update(str(path.name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _origin(top: str) -> str | None:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None
