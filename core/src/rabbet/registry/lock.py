"""The lock file: exactly which plugins were installed, and what differs now. Reads metadata and files, imports nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rabbet._util.files import read_text
from rabbet.contracts.kinds import KINDS
from rabbet.errors import PluginPolicyError
from rabbet.registry.certificate import wheel_digest
from rabbet.registry.composition import source_hash
from rabbet.registry.entry import Entry
from rabbet.registry.onefile import module_name

__all__ = ["LOCK_FILE", "differences", "locked_state", "read_lock", "require_locked"]

LOCK_FILE = "rabbet.lock"
_SCHEMA = 1


def locked_state(entries: Sequence[Entry], files: Sequence[str] = ()) -> dict[str, Any]:
    """What is installed, as the lock file holds it: each distribution with its contributions, and one-file plugins."""
    found: dict[str, Any] = {}
    for entry in sorted(entries, key=lambda entry: (entry.distribution, entry.kind, entry.name)):
        distribution = entry.entry_point.dist if entry.entry_point is not None else None
        if distribution is None:
            continue
        if entry.distribution not in found:
            digest = wheel_digest(distribution)
            found[entry.distribution] = {
                "version": entry.version,
                "wheel": digest or "",
                # Without a wheel the sources themselves; a wheel's hash covers them.
                "sources": "" if digest else source_hash(entry.value, ""),
                "contributions": {},
            }
        found[entry.distribution]["contributions"][f"{entry.kind}/{entry.name}"] = {
            "value": entry.value,
            "contract": entry.provided.contract if entry.provided else "",
            "core speaks": KINDS[entry.kind].version,
            "manifest": hashlib.sha256(repr(entry.provided).encode()).hexdigest(),
        }
    return {
        "schema": _SCHEMA,
        "distributions": found,
        "files": {Path(file).name: module_name(Path(file).expanduser()) for file in files},
    }


def read_lock(path: Path) -> dict[str, Any]:
    """The content of a lock file.

    Raises:
        PluginPolicyError: If it is not there, or none.
    """
    try:
        document = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PluginPolicyError(
            f"the lock file {path} cannot be read ({reason}); write one: rabbet plugins lock"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise PluginPolicyError(
            f"{path} is no lock file of schema {_SCHEMA}; write it anew: rabbet plugins lock {path}"
        )
    return document


def differences(locked: Any, here: Any, place: str = "") -> list[dict[str, str]]:
    """Each place where two states differ: ``place``, ``locked``, ``here``; an empty value is one that is not there."""
    if isinstance(locked, dict) and isinstance(here, dict):
        rows = []
        for key in sorted({*locked, *here}):
            inner = f"{place} {key}".strip() if place not in ("distributions", "files") else key
            rows += differences(locked.get(key), here.get(key), inner)
        return rows
    if locked == here:
        return []
    return [{"place": place, "locked": _shown(locked), "here": _shown(here)}]


def require_locked(path: Path, entries: Sequence[Entry], files: Sequence[str] = ()) -> None:
    """Refuse what differs from a lock file, before anything is imported.

    Raises:
        PluginPolicyError: With one line for each difference.
    """
    rows = differences(read_lock(path), locked_state(entries, files))
    if rows:
        table = "\n".join(
            f"  {row['place']}: locked {row['locked'] or 'none'}, here {row['here'] or 'none'}" for row in rows
        )
        raise PluginPolicyError(
            f"--plugins-locked {path}: what is installed is not what was locked:\n{table}\n"
            f"install what was locked, or lock what is here: rabbet plugins lock {path}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("version") or value.get("contract") or "present")
    return "" if value is None else str(value)[:16]
