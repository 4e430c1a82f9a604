"""Throw-away distributions: metadata, manifest and package in a directory, found like installed ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rabbet.contracts.kinds import KINDS, MANIFEST_GROUP

__all__ = ["write_distribution"]


def write_distribution(
    site: Path,
    name: str,
    *,
    provides: Mapping[str, str],
    version: str = "1.0",
    manifest: str | None = None,
    modules: Mapping[str, str] | None = None,
    entry_points: str = "",
    package: str = "",
) -> str:
    """Write a distribution into ``site``, a directory on ``sys.path``; returns the name of its package.

    Args:
        site: The directory.
        name: Name of the distribution, e.g. ``acme-flash``.
        provides: ``kind/name`` to ``module:Class``; each becomes an entry point and a table of the manifest.
        version: Its version.
        manifest: TOML text instead of the tables that follow from ``provides``; an empty string leaves it out.
        modules: File name to source, written into the package ``__init__.py`` is made if it is not given.
        entry_points: Further sections for ``entry_points.txt``.
        package: Name of the package; that of the distribution by default.
    """
    package = package or name.replace("-", "_")
    directory = site / package
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in {"__init__.py": "", **(modules or {})}.items():
        (directory / file).write_text(text, encoding="utf-8")
    text = manifest if manifest is not None else _manifest(provides)
    sections: dict[str, list[str]] = {}
    if text:
        (directory / "rabbet.toml").write_text(text, encoding="utf-8")
        sections[MANIFEST_GROUP] = [f"{name} = {package}:rabbet.toml"]
    for label, value in provides.items():
        kind, _, short = label.partition("/")
        sections.setdefault(KINDS[kind].group, []).append(f"{short} = {value}")
    points = "".join(f"[{group}]\n" + "\n".join(lines) + "\n\n" for group, lines in sections.items()) + entry_points
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return package


def _manifest(provides: Mapping[str, str]) -> str:
    tables = []
    for label in provides:
        kind, _, short = label.partition("/")
        major = KINDS[kind].version.split(".")[0]
        contract = f">={KINDS[kind].version},<{int(major) + 1}"
        tables.append(f'[[provides]]\nkind = "{kind}"\nname = "{short}"\ncontract = "{contract}"\npriority = 10\n')
    return "schema = 1\n\n" + "\n".join(tables)
