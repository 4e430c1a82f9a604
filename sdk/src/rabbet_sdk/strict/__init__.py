"""Strict twins: for each kind a minimal plugin that offers its contract and nothing else, and a host that does so.

A twin is a working example too: the scaffold copies it. Its instances raise ``OutsideContract`` on any attribute that
is not there, so that a probe of core's (``hasattr``, ``getattr`` with a default) cannot pass unseen.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["OutsideContract", "install_twins", "seal", "twin_kinds", "twin_table"]

_T = TypeVar("_T", bound=type)
_HERE = Path(__file__).parent


class OutsideContract(Exception):
    """Something asked for what no contract offers. No AttributeError: ``hasattr`` must not swallow it."""


def seal(cls: _T) -> _T:
    """Make instances of ``cls`` raise ``OutsideContract`` where an attribute is missing; dunder names stay as they are."""
    found = getattr(cls, "__getattr__", None)

    def refuse(self: Any, name: str) -> Any:
        if found is not None:
            try:
                return found(self, name)
            except AttributeError:
                pass
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise OutsideContract(f"{type(self).__name__}.{name} is no part of the contract")

    cls.__getattr__ = refuse  # type: ignore[attr-defined]
    return cls


def twin_kinds() -> tuple[str, ...]:
    """Kinds that have a twin."""
    return tuple(sorted(path.stem for path in _HERE.glob("*.toml")))


def twin_table(kind: str) -> dict[str, Any]:
    """The twin's ``[[provides]]`` table.

    Raises:
        KeyError: If the kind has no twin.
    """
    path = _HERE / f"{kind}.toml"
    if not path.is_file():
        raise KeyError(f"no twin for the kind {kind!r}; there are: {', '.join(twin_kinds())}")
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["provides"][0]
    return table


def twin_class(kind: str) -> str:
    """``module:Class`` of the twin: the one class of its module that is named ``Strict...`` and decorated."""
    source = (_HERE / f"{kind}.py").read_text(encoding="utf-8")
    decorated = source[source.index("\n@register_") :]
    name = decorated[decorated.index("class Strict") + 6 :].split("(")[0].split(":")[0].strip()
    return f"rabbet_sdk.strict.{kind}:{name}"


def install_twins(site: Path) -> None:
    """Write a distribution ``rabbet-strict`` with all twins into ``site``, a directory on ``sys.path``."""
    from rabbet_sdk.fakes.dist import write_distribution

    kinds = twin_kinds()
    tables = "\n".join(
        (_HERE / f"{kind}.toml").read_text(encoding="utf-8").replace("schema = 1\n", "") for kind in kinds
    )
    write_distribution(
        site,
        "rabbet-strict",
        provides={f"{kind}/{twin_table(kind)['name']}": twin_class(kind) for kind in kinds},
        manifest=f"schema = 1\n\n{tables}",
    )
