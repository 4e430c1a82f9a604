"""Finds contributions in the metadata of what is installed. Imports no plugin.

A distribution's manifest lies in its top-level package. The package is located, not imported: ``find_spec`` on a
top-level name runs none of its code.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, DistributionFinder, EntryPoint, MetadataPathFinder, distributions
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from rabbet._util.installed import without_leftovers
from rabbet.contracts.kinds import KINDS, MANIFEST_GROUP
from rabbet.contracts.registration import normalise_name
from rabbet.registry.certificate import package_directory
from rabbet.registry.entry import Entry, State
from rabbet.registry.manifest import Manifest, Native, parse_manifest
from rabbet.registry.policy import canonical_distribution
from rabbet.registry.versions import contract_problem

__all__ = ["CATALOG_GROUP", "TRUSTED_CATALOG", "Found", "catalogs", "discover", "installed_distributions"]

logger = logging.getLogger(__name__)

CATALOG_GROUP = "rabbet.catalog"
"""Entry points ``package:file`` of catalogs; see ``rabbet.registry.known``."""
TRUSTED_CATALOG = "rabbet-catalog"
"""The distribution whose catalog says which others are the project's own. An author field could be anybody's."""

_CATALOG_SCHEMA = 1
_GROUPS = {kind.group: kind.name for kind in KINDS.values()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """All contributions, and what is wrong with manifests."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def discover(path: Sequence[str] | None = None) -> Found:
    """Scan installed distributions.

    Args:
        path: Directories to scan instead of ``sys.path``; manifests are then looked for there too.
    """
    entries: list[Entry] = []
    problems: list[str] = []
    seen: set[tuple[str, str, str, str]] = set()
    doubles: set[str] = set()
    found = list(installed_distributions(path))
    own = _first_party(found)
    for distribution in found:
        points = [
            point for point in distribution.entry_points if point.group in _GROUPS or point.group == MANIFEST_GROUP
        ]
        if not points:
            continue
        name, version = distribution.metadata["Name"], distribution.version
        manifest, trouble = _manifest(points, distribution)
        problems += [f"{name} {version}: {item}" for item in trouble]
        for point in points:
            if point.group == MANIFEST_GROUP:
                continue
            entry = _entry(point, distribution, manifest, own)
            key = (canonical_distribution(name), entry.kind, entry.name, entry.value)
            if key in seen:
                doubles.add(name)
                continue
            seen.add(key)
            entries.append(entry)
        problems += _without_entry_point(manifest, entries, name)
    for name in sorted(doubles):
        message = "%s is installed twice (editable and as a wheel?) and taken once; rabbet plugins doctor shows where"
        logger.warning(message, name)
    return Found(entries=tuple(entries), problems=tuple(problems))


def installed_distributions(path: Sequence[str] | None = None) -> Iterable[Distribution]:
    """What is on the path, doubles included, but not what builds of editable installations left beside sources."""
    if path is None:
        return without_leftovers(distributions())
    return without_leftovers(MetadataPathFinder.find_distributions(DistributionFinder.Context(path=list(path))))


def catalogs(found: Iterable[Distribution], owner: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and table of each distribution that a catalog lists; a damaged catalog is left out with a warning.

    Args:
        found: Where to look.
        owner: Only the catalogs of this distribution.
    """
    for distribution in found:
        for point in distribution.entry_points:
            if point.group != CATALOG_GROUP or owner not in ("", canonical_distribution(distribution.name)):
                continue
            package, _, file = point.value.partition(":")
            try:
                folder = package_directory(distribution, package)
                if folder is None:
                    raise ValueError(f"there is no package {package}")
                document = tomllib.loads((folder / file).read_text(encoding="utf-8"))
                if document.get("schema") != _CATALOG_SCHEMA:
                    raise ValueError(f"schema is {document.get('schema')!r}, not {_CATALOG_SCHEMA}")
                rows = [(str(item["name"]), item) for item in document["distribution"]]
                if not all(_is_table(row) for _, item in rows for row in item["provides"]):
                    raise ValueError("provides holds something else than tables of kind, name, aliases and contract")
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("the catalog %s of %s is left out: %s", point.value, distribution.name, error)
                continue
            yield from rows


def _is_table(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("aliases", []), list):
        return False
    return all(isinstance(row.get(key, ""), str) for key in ("kind", "name", "contract"))


def _first_party(found: Sequence[Distribution]) -> frozenset[str]:
    """Names of the project's own distributions. Other catalogs have no say in this."""
    rows = catalogs(found, TRUSTED_CATALOG)
    return frozenset(canonical_distribution(name) for name, row in rows if row.get("first_party"))


def _entry(point: EntryPoint, distribution: Distribution, manifest: Manifest | None, own: frozenset[str]) -> Entry:
    kind = _GROUPS[point.group]
    name = normalise_name(kind, point.name)
    provided = manifest.find(kind, name) if manifest else None
    state, reason = State.COMPATIBLE, ""
    if provided is None:
        state = State.UNDECLARED
        reason = "its manifest has no such table" if manifest else "the distribution has no manifest"
    elif (problem := contract_problem(kind, provided.contract)) or (
        provided.native is not None and (problem := _native_problem(provided.native))
    ):
        state, reason = State.INCOMPATIBLE, problem
    return Entry(
        kind=kind,
        name=name,
        distribution=distribution.metadata["Name"],
        version=distribution.version,
        value=point.value,
        entry_point=point,
        provided=provided,
        state=state,
        reason=reason,
        is_bundled=canonical_distribution(distribution.metadata["Name"]) in own,
    )


def _manifest(points: Sequence[EntryPoint], distribution: Distribution) -> tuple[Manifest | None, tuple[str, ...]]:
    point = next((item for item in points if item.group == MANIFEST_GROUP), None)
    if point is None:
        return None, ()
    package, _, file_name = point.value.partition(":")
    if "." in package:
        return None, (f"the manifest's module {package!r} must be a top-level package",)
    directory = package_directory(distribution, package)
    if directory is None or not (directory / file_name).is_file():
        return None, (f"the manifest {point.value} does not exist",)
    manifest = parse_manifest((directory / file_name).read_text(encoding="utf-8"))
    return manifest, manifest.problems


def _without_entry_point(manifest: Manifest | None, entries: Sequence[Entry], name: str) -> list[str]:
    if manifest is None:
        return []
    have = {(entry.kind, entry.name) for entry in entries if entry.distribution == name}
    return [
        f"{name}: the manifest declares {item.kind}/{item.name}, but there is no such entry point"
        for item in manifest.provides
        if (item.kind, item.name) not in have
    ]


def _native_problem(native: Native) -> str:
    """Why compiled parts cannot be loaded here, or an empty string. Asks metadata only."""
    if not native.torch:
        return ""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        torch = Version(installed_version("torch"))
        fits = torch in SpecifierSet(native.torch, prereleases=True)
    except PackageNotFoundError:
        return f"needs torch {native.torch}, which is not installed"
    except (InvalidSpecifier, InvalidVersion):
        return f"its torch range {native.torch!r} is no version range"
    return "" if fits else f"built for torch {native.torch}; {torch} is installed"
