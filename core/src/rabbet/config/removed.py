"""Options that older engines had, what replaced them, what this release lacks, and what is accepted without effect.

The tables are ``removed.toml``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["NOT_YET", "NO_EFFECT", "REMOVED", "REMOVED_VALUES"]

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

REMOVED: dict[str, str] = _TABLES["removed"]
"""Flag to what to do instead. Using one is an error."""

NOT_YET: dict[str, str] = {flag: lack for lack, names in _TABLES["lacks"].items() for flag in names}
"""Flags of the field that this release does not have, to what is missing or what to use."""

REMOVED_VALUES = {
    ("convert", "reward"): "use --convert embed",
    ("distributed-executor-backend", "ray"): "Ray is not used; use uni for one rank, mp for several",
}
"""Flag and value to what to do instead."""

NO_EFFECT: dict[str, str] = _TABLES["no_effect"]
"""Flags that are accepted with a warning and change nothing."""
