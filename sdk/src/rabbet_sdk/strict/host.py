"""A host that offers a plugin the public packages of ``rabbet`` and nothing else."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rabbet_sdk.strict import OutsideContract

__all__ = ["PUBLIC", "strict_host"]

PUBLIC = ("contracts", "types", "errors", "layers", "parallel", "weights")
"""Packages of ``rabbet`` that plugins may import."""


@contextmanager
def strict_host(package: str, found: list[str] | None = None) -> Iterator[None]:
    """While it is open, modules of ``package`` can import nothing of ``rabbet`` but its public packages.

    Args:
        package: Top-level name of the plugin's package.
        found: Takes what reaches further, one text an import, which then works; without it such an import raises.

    Raises:
        OutsideContract: Inside the block, at the import that reaches further.
    """
    original = builtins.__import__

    def guarded(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        globals = globals or {}
        importer = str(globals.get("__name__", "")).partition(".")[0]
        if level == 0 and importer == package and name.partition(".")[0] == "rabbet":
            wanted = [name] if "." in name else [f"{name}.{item}" for item in fromlist or ()] or [name]
            for item in wanted:
                parts = item.split(".")
                if len(parts) < 2 or parts[1] not in PUBLIC:
                    text = f"{globals['__name__']} imports {item}; plugins use rabbet.{{{','.join(PUBLIC)}}} only"
                    if found is None:
                        raise OutsideContract(text)
                    found.append(text)
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded
    try:
        yield
    finally:
        builtins.__import__ = original
