"""What identifies an installed distribution: the digest of its wheel, by the RECORD that the installer kept."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import Distribution

__all__ = ["wheel_digest"]


def wheel_digest(distribution: Distribution) -> str | None:
    """sha256 over the sorted ``path,hash`` rows of RECORD; None for editable installations, which have no wheel.

    Rows of the metadata, of compiled caches and of a certificate are left out: they differ with the installer.
    """
    direct = distribution.read_text("direct_url.json")
    if direct and json.loads(direct).get("dir_info", {}).get("editable"):
        return None
    rows = [
        f"{file.as_posix()},{file.hash.value if file.hash else ''}"
        for file in distribution.files or ()
        if not any(part.endswith(".dist-info") or part == "__pycache__" for part in file.parts)
        and file.name != "certificate.json"
    ]
    return hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest() if rows else None
