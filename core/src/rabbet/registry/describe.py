"""What ``rabbet plugins`` shows, as plain data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.contracts.platform import PlatformQuery
from rabbet.errors import PluginError, UnknownPluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.certificate import proof_of
from rabbet.registry.decision import Decision
from rabbet.registry.discover import installed_distributions
from rabbet.registry.entry import Entry, State
from rabbet.registry.names import nearest
from rabbet.registry.policy import canonical_distribution
from rabbet.registry.select import claim_refusals, foresee, select

__all__ = ["doctor", "explain", "list_plugins", "machine", "plugin_info", "reasons", "shadowed"]

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
                  "touches_cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
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


def machine(device: str, arch: str, dtype: str) -> SimpleNamespace:
    """The query for a machine that is not this one; ``device`` may name an architecture, such as ``sm_90``."""
    # torch calls AMD's GPUs so too.
    gpus = ("sm_", "gfx")
    if device.startswith(gpus):
        device, arch = "cuda", arch or device
    elif not device and arch.startswith(gpus):
        device = "cuda"
    return SimpleNamespace(device_type=device, arch=arch or None, dtype=dtype)


def reasons(decision: Decision) -> dict[str, Any]:
    """A decision as plain data."""
    return asdict(decision)


def explain(
    catalog: Catalog, kind: str, query: Any = None, *, name: str | None = None, is_elsewhere: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """What would be chosen and why, as lines and as data; works from manifests where a plugin cannot be loaded.

    Args:
        catalog: What is there.
        kind: Kind of plugin.
        query: What is asked for; for another machine, what ``machine`` made.
        name: An explicit choice.
        is_elsewhere: Go by manifests alone, and import nothing.
    """
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UnknownPluginError(f"there is no kind {kind!r}{hint}; kinds: {', '.join(KINDS)}")
    if kind == "platform" and query is None:
        # All that a platform needs to know is this machine.
        query = PlatformQuery(dtype="auto")
    try:
        choose = foresee if is_elsewhere else select
        decision = choose(catalog, kind, name=name, query=query)
        return list(decision.lines()), reasons(decision)
    except PluginError as error:
        rows, candidates = [str(error)], []
        for entry in catalog.of_kind(kind):
            why = "; ".join(str(item) for item in claim_refusals(entry, query)) or entry.reason
            rows.append(f"   {entry.priority:>2} {entry.name:<14} {entry.state.value:<12} {why}".rstrip())
            candidates.append(_row(catalog, entry) | {"reason": why})
        return rows, {"kind": kind, "name": None, "error": str(error), "rejected": candidates}


def shadowed(path: Sequence[str] | None = None) -> list[str]:
    """Distributions with plugins that lie on the path more than once: only the first one counts."""
    places: dict[str, list[str]] = {}
    for distribution in installed_distributions(path):
        if any(point.group.startswith("rabbet.") for point in distribution.entry_points):
            place = f"{distribution.version} in {distribution.locate_file('')}"
            places.setdefault(canonical_distribution(distribution.metadata["Name"]), []).append(place)
    return [
        f"{name} is installed {len(found)} times: {'; '.join(found)}; the first one counts, remove the others"
        for name, found in sorted(places.items())
        if len(found) > 1
    ]


def doctor(
    catalog: Catalog, name: str | None = None, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Import each plugin in a process of its own; reports time, memory, heavy modules and failures.

    Args:
        catalog: What is there.
        name: This one only.
        progress: Told of each plugin before it is imported.
    """
    rows = []
    for entry in catalog.entries:
        if entry.entry_point is None or (name is not None and entry.name != name.casefold().replace("-", "_")):
            continue
        progress(f"{entry.kind}/{entry.name} of {entry.label} ...")
        row = _row(catalog, entry) | _examine(entry)
        rows.append(row | {"result": "ok" if row["ok"] else "broken"})
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
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        # What sends people here is no news here.
        return {"ok": False, "detail": re.sub(r"[;,.]? *(and )?see:? rabbet plugins doctor[^;]*$", "", message)}
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    if places := facts.pop("tampered"):
        detail = f"changes Rabbet itself: {', '.join(places)}"
        return {"ok": False, "state": State.TAMPERED.value, "detail": detail, **facts}
    heavy = [module for module in facts["modules"] if module in _HEAVY]
    detail = f"{facts['seconds'] * 1000:.0f} ms, {facts['memory_mib']} MiB"
    detail += ", touches CUDA" if facts["touches_cuda"] else ""
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
