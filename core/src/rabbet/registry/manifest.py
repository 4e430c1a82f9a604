"""Reads a distribution's TOML manifest into typed records; what is wrong with it becomes a reason, not an exception."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.contracts.registration import normalise_name

__all__ = ["Manifest", "Native", "Provided", "parse_manifest"]

_SCHEMA = 1
_ROLES = ("front", "engine", "worker")
_KEYS = {
    "kind", "name", "contract", "aliases", "deprecated_aliases", "roles", "priority", "options", "claims", "native",
    "replaces", "probe", "adds_routes", "description",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Native:
    """Compiled parts of a contribution, checked before anything is imported.

    Attributes:
        extensions: Modules with compiled code.
        torch: Version range of torch, empty for any.
        abi: ``torch-stable``, ``pinned:VERSION`` or ``plain`` (no torch symbols at all).
        cuda_major: CUDA major versions, empty for any.
    """

    extensions: tuple[str, ...] = ()
    torch: str = ""
    abi: str = "plain"
    cuda_major: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Provided:
    """One ``[[provides]]`` table: a contribution and its claims."""

    kind: str
    name: str
    contract: str
    aliases: tuple[str, ...] = ()
    deprecated_aliases: Mapping[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ("worker",)
    priority: int = 0
    options: str | None = None
    claims: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    native: Native | None = None
    replaces: str | None = None
    adds_routes: bool = False
    description: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The manifest of one distribution."""

    provides: tuple[Provided, ...]
    problems: tuple[str, ...] = ()

    def find(self, kind: str, name: str) -> Provided | None:
        """The table for ``kind`` and normalised ``name``."""
        return next((item for item in self.provides if (item.kind, item.name) == (kind, name)), None)


def parse_manifest(text: str) -> Manifest:
    """Parse TOML. Broken tables are left out and named in ``problems``."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return Manifest(provides=(), problems=(f"no valid TOML: {error}",))
    if document.get("schema") != _SCHEMA:
        return Manifest(provides=(), problems=(f"schema is {document.get('schema')!r}; this core reads {_SCHEMA}",))
    tables = document.get("provides", [])
    if not isinstance(tables, list):
        return Manifest(provides=(), problems=("provides must be an array of tables",))
    provides: list[Provided] = []
    problems: list[str] = []
    for number, table in enumerate(tables, 1):
        parsed = _table(table)
        if isinstance(parsed, str):
            problems.append(f"provides[{number}]: {parsed}")
        else:
            provides.append(parsed)
    return Manifest(provides=tuple(provides), problems=tuple(problems))


def _table(table: Any) -> Provided | str:
    """One contribution, or what is wrong with it."""
    if not isinstance(table, dict):
        return "is no table"
    if unknown := sorted(set(table) - _KEYS):
        return f"unknown keys {', '.join(unknown)}"
    kind, name, contract = table.get("kind"), table.get("name"), table.get("contract")
    if kind not in KINDS:
        return f"kind is {kind!r}; known: {', '.join(KINDS)}"
    if not isinstance(name, str) or not name.strip():
        return "name must be a non-empty string"
    if not isinstance(contract, str):
        return f"contract must be a version range such as '>={KINDS[kind].version},<2'"
    roles = tuple(table.get("roles", ("worker",)))
    if not set(roles) <= set(_ROLES):
        return f"roles are {list(roles)}; known: {', '.join(_ROLES)}"
    priority = table.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= 99:
        return f"priority is {priority!r}; it must be an integer from 0 to 99"
    claims = table.get("claims", {})
    if not isinstance(claims, dict) or not all(isinstance(value, list) for value in claims.values()):
        return "claims must be a table of lists"
    native = table.get("native")
    return Provided(
        kind=kind,
        name=normalise_name(kind, name),
        contract=contract,
        aliases=tuple(normalise_name(kind, alias) for alias in table.get("aliases", ())),
        deprecated_aliases={
            normalise_name(kind, alias): str(release) for alias, release in table.get("deprecated_aliases", {}).items()
        },
        roles=roles,
        priority=priority,
        options=table.get("options"),
        claims={key: tuple(value) for key, value in claims.items()},
        native=None if native is None else _native(native),
        replaces=table.get("replaces"),
        adds_routes=bool(table.get("adds_routes", False)),
        description=str(table.get("description", "")),
    )


def _native(table: Mapping[str, Any]) -> Native:
    return Native(
        extensions=tuple(table.get("extensions", ())),
        torch=str(table.get("torch", "")),
        abi=str(table.get("abi", "plain")),
        cuda_major=tuple(table.get("cuda_major", ())),
    )
