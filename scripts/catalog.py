#!/usr/bin/env python3
"""Write docs/catalogue.md and the data of rabbet-catalog: what each distribution of this repository provides, from the manifests.

python scripts/catalog.py          write both
python scripts/catalog.py --check  fail if one is out of date
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from rabbet.registry.manifest import Provided, parse_manifest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "catalogue.md"
DATA = ROOT / "catalog" / "src" / "rabbet_catalog" / "catalog.toml"
HEAD = """# Catalogue

<!-- Written by scripts/catalog.py from the manifests; change those. -->

What the distributions of this repository provide. `rabbet plugins list` shows what is installed, `rabbet plugins info
NAME` the claims of one; the contracts are described in [contracts](contracts/README.md).
"""


def manifests() -> list[tuple[dict[str, Any], tuple[Provided, ...]]]:
    """The project table and the contributions of each distribution: core, the SDK, the plugins.

    Raises:
        SystemExit: If a manifest has a problem.
    """
    found = []
    for folder in (ROOT / "core", ROOT / "sdk", *sorted((ROOT / "plugins").iterdir())):
        for file in sorted(folder.glob("src/*/rabbet.toml")):
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            manifest = parse_manifest(file.read_text(encoding="utf-8"))
            if manifest.problems:
                raise SystemExit(f"{file.relative_to(ROOT)}: {'; '.join(manifest.problems)}")
            found.append((project, manifest.provides))
    return found


def row(item: Provided) -> str:
    """One contribution."""
    claims = "; ".join(f"{key}: {', '.join(str(value) for value in values)}" for key, values in item.claims.items())
    names = ", ".join(f"`{name}`" for name in (item.name, *item.aliases))
    cells = (item.kind, names, f"`{item.contract}`", str(item.priority), claims)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for project, provides in manifests():
        parts.append(f"## {project['name']}\n\n{project['description']}.\n")
        rows = [row(item) for item in sorted(provides, key=lambda item: (item.kind, item.name))]
        header = ["| kind | name and aliases | contract | priority | claims |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([*header, *rows]) + "\n")
    return "\n".join(parts)


def data() -> str:
    """The catalog: strings and lists of strings are written as JSON does, which TOML reads alike."""
    lines = ["# Written by scripts/catalog.py from the manifests.", "schema = 1"]
    for project, provides in manifests():
        lines += ["", "[[distribution]]", f"name = {json.dumps(project['name'])}", "first_party = true"]
        lines.append(f"description = {json.dumps(project['description'])}")
        for item in sorted(provides, key=lambda item: (item.kind, item.name)):
            lines += ["", "[[distribution.provides]]", f"kind = {json.dumps(item.kind)}"]
            lines.append(f"name = {json.dumps(item.name)}")
            if item.aliases:
                lines.append(f"aliases = {json.dumps(list(item.aliases))}")
            lines.append(f"contract = {json.dumps(item.contract)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for file, text in ((PAGE, page()), (DATA, data())):
        if sys.argv[1:] != ["--check"]:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{file.relative_to(ROOT)} is out of date: python scripts/catalog.py")
