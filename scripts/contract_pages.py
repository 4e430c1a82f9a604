#!/usr/bin/env python3
"""Write docs/contracts/: one page for each kind of plugin, from the contracts' own docstrings.

python scripts/contract_pages.py          write the pages
python scripts/contract_pages.py --check  fail if a page is out of date
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from pathlib import Path

from rabbet import contracts
from rabbet.contracts import KINDS, Kind

DOCS = Path(__file__).parents[1] / "docs" / "contracts"


def block(text: str | None) -> str:
    """A docstring as Markdown: sections of the Google style become bold words, drawings become code."""
    lines = inspect.cleandoc(text or "").splitlines()
    out: list[str] = []
    in_section = False
    for line in lines:
        bare = line.strip()
        if bare in ("Args:", "Returns:", "Raises:", "Attributes:"):
            in_section = True
            out += ["", f"**{bare[:-1]}**", ""]
        elif not bare:
            in_section = False
            out.append("")
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = bare.partition(": ")
            out.append(f"- `{name}`: {rest}" if colon and " " not in name else f"- {bare}")
        elif in_section:
            out.append(f"  {bare}")
        elif line.startswith("    "):
            out.append(line)
        else:
            out.append(bare)
    return "\n".join(out).replace("``", "`").strip()


def signature(name: str, function: object) -> str:
    """``def name(...)`` as the contract declares it, without quotes round annotations."""
    text = str(inspect.signature(function)).replace("'", "")  # type: ignore[arg-type]
    return f"```python\ndef {name}{text}\n```"


def class_section(cls: type) -> str:
    """Heading, docstring and methods of one class."""
    parts = [f"## {cls.__name__}", block(cls.__doc__)]
    if dataclasses.is_dataclass(cls):
        fields = "\n".join(
            f"    {field.name}: {field.type}"
            + (
                ""
                if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                else " = ..."
            )
            for field in dataclasses.fields(cls)
        )
        parts.append(f"```python\nclass {cls.__name__}:\n{fields}\n```")
        return "\n\n".join(parts)
    for name, member in vars(cls).items():
        is_property = isinstance(member, property)
        function = member.fget if is_property else getattr(member, "__func__", member)
        if not inspect.isfunction(function) or (name.startswith("_") and name != "__init__"):
            continue
        marks = [
            word
            for word, holds in (
                ("class method", isinstance(member, classmethod)),
                ("property", is_property),
                ("abstract", getattr(function, "__isabstractmethod__", False)),
            )
            if holds
        ]
        suffix = f" ({', '.join(marks)})" if marks else ""
        parts += [f"### {name}{suffix}", signature(name, function), block(function.__doc__)]
    return "\n\n".join(part for part in parts if part)


def page(kind: Kind) -> str:
    """The whole page of one kind."""
    module_name, base_name = kind.base.split(":")
    module = importlib.import_module(module_name)
    classes = [getattr(module, name) for name in module.__all__ if inspect.isclass(getattr(module, name))]
    classes.sort(key=lambda cls: cls.__name__ != base_name)
    head = (
        f"# {kind.name}\n\n"
        "<!-- Written by scripts/contract_pages.py from the docstrings; change those. -->\n\n"
        f"| | |\n|---|---|\n| contract | `{module_name}.{base_name}`, version {kind.version} |\n"
        f"| entry-point group | `{kind.group}` |\n"
        f'| decorator | `@rabbet.contracts.{decorators()[kind.name]}("NAME")` |\n'
        f"| chosen by | {kind.chosen_by} |\n"
    )
    return "\n\n".join([head, block(module.__doc__), *(class_section(cls) for cls in classes)]) + "\n"


def decorators() -> dict[str, str]:
    """Kind to the name of its decorator."""
    names = [name for name in contracts.__all__ if name.startswith("register_")]
    return {inspect.getclosurevars(getattr(contracts, name)).nonlocals["kind"]: name for name in names}


def pages() -> dict[Path, str]:
    """Every page and the index."""
    register = decorators()
    rows = "\n".join(
        f"| [{k.name}]({k.name}.md) | `{k.group}` | `@{register[k.name]}` | {k.version} | {k.chosen_by} |"
        for k in KINDS.values()
    )
    index = (
        "# Contracts\n\n<!-- Written by scripts/contract_pages.py. -->\n\nOne page for each kind of plugin, in the order in "
        "which the kinds are resolved.\n\n| kind | entry-point group | decorator | version | chosen by |\n"
        f"|---|---|---|---|---|\n{rows}\n"
    )
    return {DOCS / "README.md": index} | {DOCS / f"{kind.name}.md": page(kind) for kind in KINDS.values()}


def main() -> int:
    """Write or check."""
    is_check = "--check" in sys.argv[1:]
    stale = []
    for path, text in pages().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not is_check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if is_check and stale:
        print(f"out of date: {', '.join(stale)}; run python scripts/contract_pages.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
