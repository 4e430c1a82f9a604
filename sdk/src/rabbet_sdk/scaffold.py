"""``rabbet-sdk new``: a distribution that works from the first minute. Its implementation is the kind's strict twin."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.registry.names import nearest
from rabbet_sdk.strict import twin_class, twin_kinds, twin_table

__all__ = ["Names", "ScaffoldError", "names_for", "new_plugin"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class ScaffoldError(Exception):
    """The scaffold cannot be written; the message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names of one new plugin.

    Attributes:
        kind: Kind of plugin.
        name: Name that users choose it by.
        distribution: Name of the distribution.
        package: Import name.
        class_name: Name of the class.
        suite: Name of the conformance suite.
    """

    kind: str
    name: str
    distribution: str
    package: str
    class_name: str
    suite: str


def names_for(kind: str, name: str, distribution: str | None = None) -> Names:
    """Derive all names.

    Raises:
        ScaffoldError: If there is no such kind, or a name cannot be used.
    """
    kind = kind.replace("-", "_")
    if kind not in twin_kinds():
        close = nearest(kind, twin_kinds())
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ScaffoldError(f"there is no kind {kind!r}{hint}; kinds: {', '.join(twin_kinds())}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ScaffoldError(f"NAME is {name!r}; it must start with a letter and hold letters, digits, - and _ only")
    name = name if KINDS[kind].verbatim else name.casefold().replace("-", "_")
    owner = distribution or f"rabbet-{kind}-{name}".replace("_", "-").casefold()
    if not _NAME.fullmatch(owner):
        raise ScaffoldError(f"--distribution is {owner!r}; it must hold letters, digits, - and _ only")
    from rabbet_sdk.conformance import SUITES

    camel = name if KINDS[kind].verbatim else "".join(part.capitalize() for part in name.split("_"))
    twin = twin_class(kind).rpartition(":")[2]
    return Names(
        kind=kind,
        name=name,
        distribution=owner,
        package=owner.replace("-", "_"),
        class_name=camel if KINDS[kind].verbatim else twin.replace("Strict", camel, 1),
        suite=SUITES[kind],
    )


def new_plugin(names: Names, directory: Path) -> list[Path]:
    """Write the distribution into ``directory``; returns the files.

    Raises:
        ScaffoldError: If the directory exists and is not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ScaffoldError(f"{directory} exists and is not an empty directory; choose another one with --directory")
    written = []
    for path, text in _files(names):
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def _files(names: Names) -> Iterator[tuple[str, str]]:
    package = f"src/{names.package}"
    yield f"{package}/__init__.py", f'"""{names.kind}/{names.name} for Rabbet."""\n'
    yield f"{package}/py.typed", ""
    yield f"{package}/plugin.py", implementation(names)
    yield f"{package}/rabbet.toml", _manifest(names)
    values = {
        "kind": names.kind,
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "class_name": names.class_name,
        "suite": names.suite,
        "group": KINDS[names.kind].group,
        "chosen_by": KINDS[names.kind].chosen_by,
        "core_range": ">=0.1,<0.2",
        "test_class": "".join(part.capitalize() for part in re.split("[_-]", names.name)),
    }
    for template, path in (
        ("pyproject.toml", "pyproject.toml"),
        ("README.md", "README.md"),
        ("test_conformance.py", "tests/test_conformance.py"),
        ("ci.yml", ".github/workflows/ci.yml"),
    ):
        yield path, _fill(template, values)


def _fill(template: str, values: dict[str, str]) -> str:
    text = (resources.files("rabbet_sdk") / "templates" / f"{template}.tmpl").read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"<<{key}>>", value)
    return text


def implementation(names: Names) -> str:
    """The twin's source under the new names, without its seal."""
    source = (resources.files("rabbet_sdk") / "strict" / f"{names.kind}.py").read_text(encoding="utf-8")
    twin, name = twin_class(names.kind).rpartition(":")[2], str(twin_table(names.kind)["name"])
    lines = [
        line for line in source.splitlines() if line.strip() not in ("from rabbet_sdk.strict import seal", "@seal")
    ]
    text = "\n".join(lines).replace(twin, names.class_name).replace(f'"{name}"', f'"{names.name}"')
    # The import left an empty section behind.
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip() + "\n"


def _manifest(names: Names) -> str:
    table: dict[str, Any] = twin_table(names.kind)
    rows = [
        "schema = 1",
        "",
        "[[provides]]",
        f'kind = "{names.kind}"',
        f'name = "{names.name}"',
        f'contract = "{table["contract"]}"',
        f"roles = {json.dumps(table.get('roles', ['worker']))}",
        "priority = 10",
        *(["adds_routes = true"] if table.get("adds_routes") else []),
    ]
    if table.get("claims"):
        rows += ["# Promises: each is tested, and what is not promised has to be refused.", "[provides.claims]"]
        rows += [f"{key} = {json.dumps(value)}" for key, value in table["claims"].items()]
    return "\n".join(rows) + "\n"
