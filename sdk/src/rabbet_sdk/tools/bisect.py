"""Finds the plugins that make a command fail: by denying halves of them, quarters, ... until it no longer does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import State
from rabbet.registry.policy import canonical_distribution

__all__ = ["bisect_command", "smallest"]

Outcome = Literal["passes", "fails", "other"]
_VARIABLE = "RABBET_PLUGINS_DENY"


def smallest(candidates: Sequence[str], run: Callable[[Sequence[str]], Outcome]) -> list[str]:
    """The smallest set of candidates, as far as halving finds it, without which the command passes.

    ``other`` (a plugin that the command cannot do without is among those denied) says nothing about either part, so parts
    are made smaller then.

    Args:
        candidates: Names.
        run: What becomes of the command if these are denied.
    """
    known, parts, is_known = list(candidates), 2, False
    while known and not (is_known and len(known) == 1):
        size = -(-len(known) // min(parts, len(known)))
        chunks = [known[i : i + size] for i in range(0, len(known), size)]
        rests = (
            [[name for name in known if name not in chunk] for chunk in chunks] if len(chunks) > 2 and is_known else []
        )
        hit = next((part for part in [*chunks, *rests] if part and run(part) == "passes"), None)
        if hit is not None:
            known, parts, is_known = hit, 2, True
        elif size == 1:
            break
        else:
            parts *= 2
    return known if is_known else []


def bisect_command(command: Sequence[str], *, timeout_s: float = 600) -> dict[str, Any]:
    """Run ``command`` with more and less plugins denied, each through the environment.

    Returns:
        ``culprits`` (``kind/name``), ``runs`` (what was denied and what became of it) and a ``note``.
    """
    entries = [entry for entry in Catalog.scan().entries if entry.state is not State.DENIED]
    names = sorted(
        {
            f"{e.kind}/{e.name}"
            for e in entries
            if canonical_distribution(e.distribution) not in ("rabbet-core", "rabbet-sdk")
        }
    )
    runs: list[dict[str, Any]] = []
    known: dict[tuple[str, ...], Outcome] = {}
    first = _status(command, (), timeout_s)
    runs.append({"denied": [], "outcome": "passes" if first == 0 else "fails", "status": first})

    def run(denied: Sequence[str]) -> Outcome:
        key = tuple(denied)
        if key not in known:
            status = _status(command, denied, timeout_s)
            known[key] = "passes" if status == 0 else "fails" if status == first else "other"
            runs.append({"denied": list(denied), "outcome": known[key], "status": status})
        return known[key]

    if first == 0:
        return {"culprits": [], "runs": runs, "note": "the command does not fail"}
    culprits = smallest(names, run)
    note = "" if culprits else "it fails without each of the plugins too, or cannot run without the one that fails"
    return {"culprits": culprits, "runs": runs, "note": note}


def _status(command: Sequence[str], denied: Sequence[str], timeout_s: float) -> int:
    """Exit status; -1 if it ran out of time."""
    rules = [rule for rule in (os.environ.get(_VARIABLE, ""), *denied) if rule]
    environment = os.environ | ({_VARIABLE: ",".join(rules)} if rules else {})
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return -1
    return done.returncode
