"""What lies on the path as a distribution without being installed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import Distribution

from packaging.utils import canonicalize_name

__all__ = ["is_editable", "without_leftovers"]


def is_editable(distribution: Distribution) -> bool:
    """Whether it was installed with ``pip install -e`` (PEP 610)."""
    direct = distribution.read_text("direct_url.json")
    return bool(direct and json.loads(direct).get("dir_info", {}).get("editable"))


def without_leftovers(found: Iterable[Distribution]) -> list[Distribution]:
    """All but the ``.egg-info`` that the build of an editable installation left beside the sources, which are on the path."""
    everything = list(found)
    left = {id(item): canonicalize_name(item.name) for item in everything if _folder(item).endswith(".egg-info")}
    edited = {
        name
        for item in (everything if left else ())
        if (name := canonicalize_name(_folder(item).partition("-")[0])) in left.values() and is_editable(item)
    }
    return [item for item in everything if left.get(id(item)) not in edited]


def _folder(distribution: Distribution) -> str:
    """Name of the metadata's folder: reading the metadata of hundreds would take longer than all else at the start."""
    return getattr(getattr(distribution, "_path", None), "name", "")
