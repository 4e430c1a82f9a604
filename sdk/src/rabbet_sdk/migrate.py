"""``rabbet-sdk migrate``: what changed between two versions of the contracts that a plugin is written against.

Core ships the signatures of each contract, of this version and of earlier ones, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from rabbet.contracts.kinds import KINDS
from rabbet.errors import PluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import Entry
from rabbet.registry.names import nearest
from rabbet.registry.policy import canonical_distribution

__all__ = ["differences", "known_versions", "migrate", "migration_page"]

_ABSENT = object()


def known_versions(kind: str) -> dict[str, dict[str, Any]]:
    """Version to signatures, oldest first; the last is this core's."""
    folder = files("rabbet.contracts") / "signatures"
    texts = [(folder / f"{kind}.json").read_text(encoding="utf-8")]
    history = [item for item in (folder / "history").iterdir() if item.name.rpartition("-")[0] == kind]
    texts += [item.read_text(encoding="utf-8") for item in history]
    documents = [json.loads(text) for text in texts]
    return {str(item["version"]): item for item in sorted(documents, key=lambda item: Version(item["version"]))}


def migrate(plugin: str, *, since: str | None = None, until: str | None = None) -> list[dict[str, Any]]:
    """For each contract that ``plugin`` is written against: both versions and every change, ``minor`` or ``major``.

    Args:
        plugin: A distribution, ``kind/name``, or a kind.
        since: Version to start from; the lowest known one that the manifest's range holds by default.
        until: Version to arrive at; this core's by default.

    Raises:
        PluginError: If nothing of that name is installed, or a version is not known.
    """
    rows: dict[str, dict[str, Any]] = {}
    for kind, declared in _contracts(plugin):
        known = known_versions(kind)
        old = since or next((version for version in known if _holds(declared, version)), next(iter(known)))
        new = until or next(reversed(known))
        for option, version in (("--from", old), ("--to", new)):
            if version not in known:
                raise PluginError(f"{option} {version}: known versions of {kind} are {', '.join(known)}", kind=kind)
        changes = [{"level": level, "change": text} for level, text in differences(known[old], known[new])]
        rows[f"{kind} {old}"] = {"kind": kind, "from": old, "to": new, "declared": declared, "changes": changes}
    return list(rows.values())


def migration_page(row: Mapping[str, Any]) -> str:
    """A row of ``migrate`` as Markdown, to be completed by hand with what an author has to write instead."""
    lines = [f"# {row['kind']}: from {row['from']} to {row['to']}", ""]
    for level, title in (("major", "What has to change"), ("minor", "What is new and asks for nothing")):
        changes = [item["change"] for item in row["changes"] if item["level"] == level]
        if changes:
            lines += [
                f"## {title}",
                "",
                *[f"- `{text.partition(' ')[0]}` {text.partition(' ')[2]}" for text in changes],
                "",
            ]
    following = Version(row["to"]).major + 1
    lines += [f'In the manifest, write `contract = ">={row["to"]},<{following}"`.', ""]
    return "\n".join(lines)


def _contracts(plugin: str) -> list[tuple[str, str]]:
    """Kind and declared range of everything that ``plugin`` names."""
    if plugin in KINDS:
        return [(plugin, "")]
    entries = Catalog.scan().entries
    found = [entry for entry in entries if _is_meant(entry, plugin)]
    if not found:
        words = sorted({word for entry in entries for word in (entry.distribution, f"{entry.kind}/{entry.name}")})
        close = nearest(plugin, [*words, *KINDS])
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise PluginError(f"{plugin!r} is no installed distribution, no kind/name and no kind{hint}")
    return [(entry.kind, entry.provided.contract if entry.provided else "") for entry in found]


def _is_meant(entry: Entry, plugin: str) -> bool:
    is_owner = canonical_distribution(entry.distribution) == canonical_distribution(plugin)
    return is_owner or f"{entry.kind}/{entry.name}" == plugin


def _holds(declared: str, version: str) -> bool:
    try:
        return bool(declared) and version in SpecifierSet(declared)
    except InvalidSpecifier:
        return False


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``minor`` or ``major``, and what it is, for each difference. Minor is what old plugins cannot notice: a class, a
    field with a default, a method with a body, an attribute, a member of an enumeration, each of them added."""
    found: list[tuple[str, str]] = []
    for name in sorted({*old["classes"], *new["classes"]}):
        before, after = old["classes"].get(name), new["classes"].get(name)
        if before is None or after is None:
            found.append(("minor", f"{name} is new") if before is None else ("major", f"{name} is gone"))
            continue
        for group in sorted({*before, *after}):
            had, has = before.get(group, {}), after.get(group, {})
            for item in sorted({*had, *has}):
                one, other = had.get(item, _ABSENT), has.get(item, _ABSENT)
                if one != other:
                    found.append(_judge(f"{name}.{item}", group, one, other))
    return found


def _judge(place: str, group: str, one: Any, other: Any) -> tuple[str, str]:
    if other is _ABSENT:
        return "major", f"{place} is gone"
    if one is _ABSENT:
        if group == "fields" and "default" not in other:
            return "major", f"{place} is a new field without a default"
        if group == "methods" and other["is_abstract"]:
            return "major", f"{place} is a new method that plugins must have"
        return "minor", f"{place} is new"
    if group == "methods" and {**one, "is_abstract": False} == {**other, "is_abstract": False}:
        is_free = one["is_abstract"]
        return ("minor", f"{place} is optional now") if is_free else ("major", f"{place} is abstract now")
    return "major", f"{place} was {_short(one)}, is {_short(other)}"


def _short(value: Any) -> str:
    if isinstance(value, dict) and "parameters" in value:
        inner = ", ".join(f"{item['name']}: {item['type']}".removesuffix(": ") for item in value["parameters"])
        return f"({inner}) -> {value['returns']}"
    return json.dumps(value)
