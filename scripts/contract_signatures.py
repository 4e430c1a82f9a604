#!/usr/bin/env python3
"""Write signatures/KIND.json beside the contracts: the signatures of each contract, by which a change of one is seen and judged.

python scripts/contract_signatures.py          write what changed; refuses a change whose version was not raised
python scripts/contract_signatures.py --check  fail if a file is out of date
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rabbet_sdk.migrate import differences

from rabbet.contracts import KINDS, Kind

ROOT = Path(__file__).parents[1]
DUMPS = ROOT / "core" / "src" / "rabbet" / "contracts" / "signatures"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def dump(kind: Kind) -> dict[str, Any]:
    """The contract of one kind: its base class, and every class of Rabbet's contracts and types that it speaks of."""
    module = importlib.import_module(kind.base.partition(":")[0])
    others = {item.base for item in KINDS.values() if item.name != kind.name}
    waiting = [getattr(module, name) for name in module.__all__]
    waiting = [item for item in waiting if inspect.isclass(item) and f"{item.__module__}:{item.__name__}" not in others]
    found: dict[str, Any] = {}
    while waiting:
        cls = waiting.pop()
        if cls.__name__ not in found:
            found[cls.__name__] = _class(cls)
            waiting += _named(cls, json.dumps(found[cls.__name__]))
    return {"kind": kind.name, "version": kind.version, "classes": dict(sorted(found.items()))}


def _named(cls: type, text: str) -> list[type]:
    """Classes of contracts and types that the source of a class's module knows and its signatures mention."""
    source = inspect.getsource(sys.modules[cls.__module__])
    found = [getattr(sys.modules[cls.__module__], word, None) for word in set(re.findall(r"[A-Z]\w+", text))]
    for place, names in re.findall(r"from (rabbet\.(?:contracts|types)[\w.]*) import \(?([\w, \n]+)", source):
        module = importlib.import_module(place)
        for name in re.findall(r"\w+", names):
            if re.search(rf"\b{name}\b", text):
                found.append(getattr(module, name, None))
    own = ("rabbet.contracts", "rabbet.types")
    return [item for item in found if inspect.isclass(item) and item.__module__.startswith(own)]


def _class(cls: type) -> dict[str, Any]:
    if issubclass(cls, enum.Enum):
        return {"members": {member.name: member.value for member in cls}}
    if dataclasses.is_dataclass(cls):
        fields = {
            field.name: {"type": str(field.type)} | ({} if (text := _default(field)) is None else {"default": text})
            for field in dataclasses.fields(cls)
        }
        return {"fields": fields}
    methods, attributes = {}, {}
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            methods[name] = _method(member, function)
        elif not name.startswith("_") and not callable(member):
            attributes[name] = _text(member)
    return {"methods": methods, "attributes": attributes}


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return _text(field.default)
    return (
        None if field.default_factory is dataclasses.MISSING else f"{getattr(field.default_factory, '__name__', '?')}()"
    )


def _text(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def _method(member: object, function: Any) -> dict[str, Any]:
    shape = "property" if isinstance(member, property) else type(member).__name__
    signature = inspect.signature(function)
    return {
        "shape": shape,
        "is_abstract": bool(getattr(function, "__isabstractmethod__", False)),
        "parameters": [
            {"name": item.name, "kind": item.kind.description, "type": _annotation(item.annotation)}
            | ({} if item.default is item.empty else {"default": _text(item.default)})
            for item in signature.parameters.values()
        ],
        "returns": _annotation(signature.return_annotation),
    }


def _annotation(value: Any) -> str:
    return "" if value is inspect.Parameter.empty else str(value)


def advice(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What has to be done about a changed contract; empty if nothing changed, or if its version was raised as it should."""
    found = differences(old, new)
    if not found:
        return ""
    level = "major" if any(item == "major" for item, _ in found) else "minor"
    was, now = ([int(part) for part in item["version"].split(".")] for item in (old, new))
    wanted = f"{was[0]}.{was[1] + 1}" if level == "minor" else f"{was[0] + 1}.0"
    if now[0] > was[0] or (level == "minor" and now[1] > was[1]):
        return ""
    lines = "\n".join(f"  {item}: {text}" for item, text in found)
    more = f", keep {kind}.json of {old['version']} as {kind}-{old['version']}.json in {DUMPS.name}/history"
    more += (
        f", write an adapter for plugins of {old['version']} and a page docs/migrations/{kind}-{wanted.partition('.')[0]}.md"
        if level == "major"
        else ""
    )
    return (
        f"the contract {kind} {old['version']} has changed, which is {level}:\n{lines}\n"
        f"raise its version to {wanted} in core/src/rabbet/contracts/kinds.py, say so in CHANGELOG.md{more}, then run "
        "python scripts/contract_signatures.py"
    )


def text_of(kind: Kind) -> str:
    """The file of one kind."""
    return json.dumps(dump(kind), indent=1) + "\n"


def main() -> int:
    """Write or check."""
    is_check, failed = "--check" in sys.argv[1:], []
    for kind in KINDS.values():
        path, text = DUMPS / f"{kind.name}.json", text_of(kind)
        old = path.read_text(encoding="utf-8") if path.is_file() else None
        if old == text:
            continue
        problem = advice(kind.name, json.loads(old), json.loads(text)) if old is not None else ""
        if problem or is_check:
            failed.append(problem or f"{path.name} is out of date; run python scripts/contract_signatures.py")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print("\n".join(failed), file=sys.stderr, end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
