"""Finds what a mistyped name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Up to ``count`` known names that resemble ``name``, best first; spelling of case, dash and underscore is free."""
    folded = {item.casefold().replace("-", "_"): item for item in known}
    wanted = name.casefold().replace("-", "_")
    found = difflib.get_close_matches(wanted, folded, n=count, cutoff=0.6)
    found += [
        key for key in folded if wanted and key not in found and (key.startswith(wanted) or wanted.startswith(key))
    ]
    return [folded[key] for key in found[:count]]
