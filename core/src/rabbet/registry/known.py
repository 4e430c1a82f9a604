"""Who is known to provide what, installed or not: read from catalogs, which distributions offer as plain data.

A catalog is a TOML file that an entry point of the group ``rabbet.catalog`` names as ``package:file``::

    schema = 1
    [[distribution]]
    name = "acme-quant"
    [[distribution.provides]]
    kind = "quantization"
    name = "acme4"
    aliases = ["acme-int4"]
    contract = ">=1.0,<2"

Catalogs serve hints in errors only, and are read when there is an error; a damaged one is left out with a warning.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from rabbet.contracts.registration import normalise_name
from rabbet.registry.certificate import package_directory
from rabbet.registry.discover import CATALOG_GROUP, installed_distributions
from rabbet.registry.versions import contract_problem

__all__ = ["CATALOG_GROUP", "install_hint"]

logger = logging.getLogger(__name__)
_SCHEMA = 1


def install_hint(kind: str, name: str, path: Sequence[str] | None = None) -> str:
    """The ``pip install`` lines that bring ``name``, one sentence; empty if no catalog knows it.

    Args:
        kind: Kind of plugin.
        name: Its name or an alias.
        path: Directories to look for catalogs in, instead of ``sys.path``.
    """
    hints = []
    for owner, provided in _provided(path):
        names = [provided.get("name"), *provided.get("aliases", ())]
        if provided.get("kind") != kind or name not in [normalise_name(kind, str(item)) for item in names]:
            continue
        contract = provided.get("contract", "")
        problem = contract_problem(kind, contract) if contract else ""
        hints.append(f"pip install {owner}" + (f" ({problem})" if problem else ""))
    return " or ".join(dict.fromkeys(hints))


def _provided(path: Sequence[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    for distribution in installed_distributions(path):
        for point in distribution.entry_points:
            if point.group != CATALOG_GROUP:
                continue
            package, _, file = point.value.partition(":")
            try:
                folder = package_directory(distribution, package)
                if folder is None:
                    raise ValueError(f"there is no package {package}")
                document = tomllib.loads((folder / file).read_text(encoding="utf-8"))
                if document.get("schema") != _SCHEMA:
                    raise ValueError(f"schema is {document.get('schema')!r}, not {_SCHEMA}")
                rows = [(str(item["name"]), row) for item in document["distribution"] for row in item["provides"]]
                if not all(_is_table(row) for _, row in rows):
                    raise ValueError("provides holds something else than tables of kind, name, aliases and contract")
            except (OSError, ValueError, KeyError, TypeError) as error:
                name = distribution.metadata["Name"]
                logger.warning("the catalog %s of %s is left out: %s", point.value, name, error)
                continue
            yield from rows


def _is_table(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("aliases", []), list):
        return False
    return all(isinstance(row.get(key, ""), str) for key in ("kind", "name", "contract"))
