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

from collections.abc import Sequence

from rabbet.contracts.registration import normalise_name
from rabbet.registry.discover import catalogs, installed_distributions
from rabbet.registry.versions import contract_problem

__all__ = ["install_hint"]


def install_hint(kind: str, name: str, path: Sequence[str] | None = None) -> str:
    """The ``pip install`` lines that bring ``name``, one sentence; empty if no catalog knows it.

    Args:
        kind: Kind of plugin.
        name: Its name or an alias.
        path: Directories to look for catalogs in, instead of ``sys.path``.
    """
    hints = []
    listed = catalogs(installed_distributions(path))
    for owner, provided in ((owner, row) for owner, table in listed for row in table["provides"]):
        names = [provided.get("name"), *provided.get("aliases", ())]
        if provided.get("kind") != kind or name not in [normalise_name(kind, str(item)) for item in names]:
            continue
        contract = provided.get("contract", "")
        problem = contract_problem(kind, contract) if contract else ""
        hints.append(f"pip install {owner}" + (f" ({problem})" if problem else ""))
    return " or ".join(dict.fromkeys(hints))
