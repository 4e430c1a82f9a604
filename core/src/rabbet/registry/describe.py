"""What ``rabbet plugins`` shows, as plain data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.errors import PluginError, UnknownPluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.certificate import proof_of
from rabbet.registry.entry import Entry, State
from rabbet.registry.names import nearest
from rabbet.registry.select import claim_refusals, select

__all__ = ["doctor", "explain", "list_plugins", "plugin_info"]

_DOCTOR_TIMEOUT_S = 30
_HEAVY = ("torch", "transformers", "triton", "numpy")
_PROBE = """
import json, resource, sys, time
from rabbet.registry.catalog import Catalog
from rabbet.registry.loader import load_entry
from rabbet.registry.tamper import evidence
entry = next(e for e in Catalog.scan().entries if (e.kind, e.name, e.distribution) == tuple(sys.argv[1:4]))
before, started = set(sys.modules), time.monotonic()
load_entry(entry)
print(json.dumps({"seconds": time.monotonic() - started,
                  "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                  "tampered": [place for _, place in evidence()],
                  "modules": sorted({m.split(".")[0] for m in set(sys.modules) - before})}))
"""


def list_plugins(catalog: Catalog, kind: str | None = None) -> list[dict[str, Any]]:
    """One row a contribution, by kind and rank."""
    return [_row(catalog, entry) for name in KINDS if kind in (None, name) for entry in catalog.of_kind(name)]


def plugin_info(catalog: Catalog, name: str) -> list[dict[str, Any]]:
    """Everything known of the contributions called ``name`` (or ``kind/name``), without importing them.

    Raises:
        UnknownPluginError: With the nearest names.
    """
    kind, _, bare = name.rpartition("/")
    wanted = bare.casefold().replace("-", "_")
    found = [e for e in catalog.entries if e.name.casefold() == wanted and kind in ("", e.kind)]
    if not found:
        close = nearest(bare, {entry.name for entry in catalog.entries})
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UnknownPluginError(f"no installed plugin is named {name!r}{hint}", name=name)
    rows = []
    for entry in found:
        provided = entry.provided
        claims = {key: list(value) for key, value in provided.claims.items()} if provided else {}
        rows.append(
            _row(catalog, entry)
            | {
                "entry_point": entry.value,
                "chosen_by": KINDS[entry.kind].chosen_by,
                "roles": list(provided.roles) if provided else [],
                "aliases": list(provided.aliases) if provided else [],
                "claims": claims,
            }
        )
    return rows


def explain(catalog: Catalog, kind: str, query: Any = None, *, name: str | None = None) -> list[str]:
    """Lines that say what would be chosen and why; works from manifests where a plugin cannot be loaded."""
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UnknownPluginError(f"there is no kind {kind!r}{hint}; kinds: {', '.join(KINDS)}")
    try:
        return list(select(catalog, kind, name=name, query=query).lines())
    except PluginError as error:
        rows = [str(error)]
        for entry in catalog.of_kind(kind):
            reasons = "; ".join(str(item) for item in claim_refusals(entry, query)) or entry.reason
            rows.append(f"   {entry.priority:>2} {entry.name:<14} {entry.state.value:<12} {reasons}".rstrip())
        return rows


def doctor(catalog: Catalog, name: str | None = None) -> list[dict[str, Any]]:
    """Import each plugin in a process of its own; reports time, memory, heavy modules and failures."""
    rows = []
    for entry in catalog.entries:
        if entry.entry_point is None or (name is not None and entry.name != name.casefold().replace("-", "_")):
            continue
        rows.append(_row(catalog, entry) | _examine(entry))
    if name is not None and not rows:
        plugin_info(catalog, name)
    return rows


def _examine(entry: Entry) -> dict[str, Any]:
    if entry.state in (State.INCOMPATIBLE, State.DENIED):
        return {"ok": False, "detail": entry.reason}
    command = [sys.executable, "-c", _PROBE, entry.kind, entry.name, entry.distribution]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOCTOR_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "detail": f"the import did not end within {_DOCTOR_TIMEOUT_S} s"}
    if done.returncode < 0:
        return {"ok": False, "detail": f"the import killed the process (signal {-done.returncode})"}
    if done.returncode != 0:
        return {"ok": False, "detail": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    if places := facts.pop("tampered"):
        detail = f"changes Rabbet itself: {', '.join(places)}"
        return {"ok": False, "state": State.TAMPERED.value, "detail": detail, **facts}
    heavy = [module for module in facts["modules"] if module in _HEAVY]
    detail = f"{facts['seconds'] * 1000:.0f} ms, {facts['memory_mib']} MiB"
    return {"ok": True, "detail": detail + (f", imports {', '.join(heavy)}" if heavy else ""), **facts}


def _row(catalog: Catalog, entry: Entry) -> dict[str, Any]:
    proof = proof_of(entry, directory=Path(catalog.policy.certificates))
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "contract": entry.provided.contract if entry.provided else "",
        "priority": entry.priority,
        "state": entry.state.value,
        "reason": entry.reason,
        "bundled": entry.is_bundled,
        "certificate": proof.badge,
        "certificate_state": proof.state,
        "certificate_reason": proof.reason,
    }
