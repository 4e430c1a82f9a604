"""The one rule of selection, for every kind: what is named is obeyed or refused; only "auto" may pass over."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.contracts.support import Refusal
from rabbet.errors import (
    IncompatiblePluginError,
    PluginError,
    PluginPolicyError,
    PluginRefusedError,
    UnknownPluginError,
)
from rabbet.registry.catalog import Catalog
from rabbet.registry.certificate import proof_of
from rabbet.registry.decision import Decision, Rejection
from rabbet.registry.entry import Entry, State
from rabbet.registry.loader import ask, load_entry

__all__ = ["claim_refusals", "foresee", "pass_over", "select"]

logger = logging.getLogger(__name__)
_OTHER_HARDWARE = ("DEVICE:", "ARCH:", "NO_DEVICE:")
"""Codes of refusals that find no fault: a plugin for hardware that is not this machine's."""
_Judge = Callable[[Catalog, Entry, Any], tuple[State, tuple[str, ...]]]


def select(
    catalog: Catalog,
    kind: str,
    *,
    name: str | None,
    query: Any = None,
    scope: str = "target",
    preferences: Sequence[str] = (),
    asked_by: str = "",
) -> Decision:
    """Choose a plugin.

    Args:
        catalog: What is there.
        kind: Kind of plugin.
        name: An explicit choice (obeyed, or an error), or None for "auto".
        query: Handed to the plugin's ``supports``; None asks nothing.
        scope: What the choice is for.
        preferences: Names that "auto" tries first, best first.
        asked_by: The option that named it, for messages.

    Raises:
        PluginError: Of the kind that says what is wrong; for "auto", if nothing is usable.
    """
    if name is not None:
        entry = catalog.find(kind, name)
        _require_selectable(entry)
        refusals = _refusals(entry, query)
        if refusals:
            raise PluginRefusedError(
                _refused(kind, entry, refusals, asked_by), kind=kind, name=entry.name, refusals=refusals
            )
        return _decision(entry, scope, asked_by or KINDS[kind].chosen_by, ())
    return _auto(catalog, kind, query, scope, preferences)


def foresee(catalog: Catalog, kind: str, *, name: str | None = None, query: Any = None) -> Decision:
    """What would be chosen on a machine that is not this one, as far as manifests tell; imports no plugin.

    Args:
        catalog: What is there.
        kind: Kind of plugin.
        name: An explicit choice, or None for "auto".
        query: Any object; what it has of ``device_type``, ``arch``, ``dtype`` and ``head_dim`` is compared with claims.

    Raises:
        PluginError: As ``select``.
    """
    if name is None:
        return replace(_auto(catalog, kind, query, "target", (), _by_manifest), asked_by="auto, by manifests alone")
    entry = catalog.find(kind, name)
    _require_selectable(entry)
    asked_by = f"{KINDS[kind].chosen_by}, by manifests alone"
    if refusals := claim_refusals(entry, query):
        raise PluginRefusedError(_refused(kind, entry, refusals, ""), kind=kind, name=entry.name, refusals=refusals)
    return _decision(entry, "target", asked_by, ())


def _auto(
    catalog: Catalog, kind: str, query: Any, scope: str, preferences: Sequence[str], judge: _Judge | None = None
) -> Decision:
    rejected: list[Rejection] = []
    chosen: Entry | None = None
    for entry in _ordered(catalog, kind, preferences):
        if chosen is not None:
            rejected.append(_rejection(entry, State.NOT_NEEDED))
            continue
        state, reasons = (judge or _try)(catalog, entry, query)
        if state is State.CHOSEN:
            chosen = entry
            continue
        rejected.append(_rejection(entry, state, reasons))
        is_here = not any(reason.removeprefix("manifest: ").startswith(_OTHER_HARDWARE) for reason in reasons)
        if state is State.BROKEN or (state is State.REFUSED and is_here and catalog.policy.is_strict):
            text = f"{kind}/{entry.name} of {entry.label} was passed over, {state.value}: {'; '.join(reasons)}"
            pass_over(catalog, text, kind=kind, name=entry.name)
    if chosen is None:
        rows = "\n".join(f"  {item.name}: {item.state}: {'; '.join(item.reasons)}" for item in rejected)
        error = PluginRefusedError if rejected else UnknownPluginError
        what = f"no installed {kind} plugin can be used:\n{rows}" if rejected else f"no {kind} plugin is installed"
        raise error(f"{what}; install one that fits, and see: rabbet plugins list", kind=kind)
    return _decision(chosen, scope, "auto", tuple(rejected))


def pass_over(catalog: Catalog, text: str, *, kind: str, name: str) -> None:
    """Tell that "auto" does without a plugin.

    Raises:
        PluginPolicyError: Instead, under ``--plugins-strict``.
    """
    if catalog.policy.is_strict:
        raise PluginPolicyError(f"{text} (--plugins-strict)", kind=kind, name=name)
    logger.warning("%s", text)


def _ordered(catalog: Catalog, kind: str, preferences: Sequence[str]) -> list[Entry]:
    """Platform's preference, then priority, then name; one entry a name, duplicates decided by the policy."""
    order = {name: index for index, name in enumerate(preferences)}
    entries: dict[str, Entry] = {}
    for entry in catalog.of_kind(kind):
        if entry.name not in entries:
            entries[entry.name] = entry
        elif entry.state is not State.DENIED and entries[entry.name].state is not State.DENIED:
            entries[entry.name] = catalog.find(kind, entry.name)
    return sorted(entries.values(), key=lambda entry: (order.get(entry.name, len(order)), -entry.priority, entry.name))


def _try(catalog: Catalog, entry: Entry, query: Any) -> tuple[State, tuple[str, ...]]:
    """How far "auto" gets with one candidate, cheapest checks first."""
    state, reasons = _by_manifest(catalog, entry, query)
    if state is not State.CHOSEN:
        return state, reasons
    try:
        refusals = _refusals(entry, query)
    except PluginError as error:
        return State.BROKEN, (str(error),)
    if refusals:
        return State.REFUSED, tuple(str(item) for item in refusals)
    return State.CHOSEN, ()


def _by_manifest(catalog: Catalog, entry: Entry, query: Any) -> tuple[State, tuple[str, ...]]:
    """The part of it that imports nothing."""
    if entry.state is not State.COMPATIBLE:
        return entry.state, (entry.reason,)
    if not entry.is_bundled and catalog.policy.auto != "any":
        # Where the query knows of architectures, a certificate of another one proves nothing.
        arch = getattr(query, "arch", None)
        proof = proof_of(entry, arch=arch, directory=Path(catalog.policy.certificates))
        if proof.state != "certified":
            text = f"auto takes bundled plugins only, or certified ones, and {proof.reason}"
            return State.DENIED, (f"{text}; name it, or pass --plugins-auto any",)
    refusals = claim_refusals(entry, query)
    if refusals:
        return State.REFUSED, tuple(f"manifest: {item}" for item in refusals)
    return State.CHOSEN, ()


def claim_refusals(entry: Entry, query: Any) -> tuple[Refusal, ...]:
    """What the manifest's claims already rule out. A claim about a fact that the query lacks rules nothing out."""
    claims = entry.provided.claims if entry.provided else {}
    refusals = []
    for claim, attribute in (("device", "device_type"), ("arch", "arch"), ("dtype", "dtype"), ("head_dim", "head_dim")):
        allowed, value = claims.get(claim), getattr(query, attribute, None)
        if allowed and value not in (None, "") and not any(_claimed(value, pattern) for pattern in allowed):
            refusals.append(Refusal(code=claim.upper(), message=f"{value} not in {list(allowed)}"))
    return tuple(refusals)


def _claimed(value: Any, pattern: Any) -> bool:
    return value == pattern or (isinstance(pattern, str) and fnmatch.fnmatchcase(str(value), pattern))


def _refusals(entry: Entry, query: Any) -> tuple[Refusal, ...]:
    has_say = query is not None and hasattr(load_entry(entry), "supports")
    return tuple(ask(entry, "supports", query, returns=tuple | list, of=Refusal)) if has_say else ()


def _require_selectable(entry: Entry) -> None:
    label = f"{entry.kind}/{entry.name} of {entry.label}"
    if entry.state is State.DENIED:
        raise PluginPolicyError(f"{label} is {entry.reason}", kind=entry.kind, name=entry.name)
    if entry.state is State.INCOMPATIBLE:
        raise IncompatiblePluginError(
            f"{entry.label} offers {entry.kind} {entry.name!r} {entry.reason}", kind=entry.kind, name=entry.name
        )


def _refused(kind: str, entry: Entry, refusals: Sequence[Refusal], asked_by: str) -> str:
    reasons = "; ".join(str(item) for item in refusals)
    return f"{asked_by or KINDS[kind].chosen_by}: {kind}/{entry.name} of {entry.label} cannot be used here: {reasons}"


def _rejection(entry: Entry, state: State, reasons: Sequence[str] = ()) -> Rejection:
    return Rejection(
        name=entry.name, distribution=entry.label, priority=entry.priority, state=state.value,
        reasons=tuple(reason for reason in reasons if reason),
    )  # fmt: skip


def _decision(entry: Entry, scope: str, asked_by: str, rejected: tuple[Rejection, ...]) -> Decision:
    return Decision(
        kind=entry.kind, scope=scope, name=entry.name, value=entry.value, distribution=entry.distribution,
        version=entry.version, contract=entry.contract, priority=entry.priority, asked_by=asked_by, rejected=rejected,
        file=str(entry.file or ""), is_checked=entry.is_checked,
    )  # fmt: skip
