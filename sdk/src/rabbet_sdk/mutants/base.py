"""What a mutant is, and where they are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["Mutant", "all_mutants", "mutant_kinds", "planter"]

_NOT_KINDS = {"__init__", "base", "detection", "level_one", "run"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A plugin with one fault.

    Attributes:
        name: Name that it is registered under; for models the architecture.
        target: ``module:Class``; empty if ``modules`` holds the class, as ``plugin.py:Plugin``.
        caught_by: The test of the suite that must fail on it; with ``[case]`` where other cases take long to pass.
        story: The defect of the field that it repeats, or what an author could get wrong.
        claims: TOML text of a ``[provides.claims]`` table in place of the twin's; None keeps the twin's.
        modules: Files of its package, for faults that act at import.
        manifest: The whole manifest, for faults in it.
        knobs: Source lines for the body of the suite's subclass, e.g. ``options = {"k": 1}``.
    """

    name: str
    caught_by: str
    story: str
    target: str = ""
    claims: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    manifest: str | None = None
    knobs: str = ""


def planter(module: dict[str, Any], register: Callable[[str], Any], twin: type) -> Callable[..., Mutant]:
    """A function that registers the twin with ``parts`` in place of its own, as an attribute of ``module``."""

    def plant(
        name: str, caught_by: str, story: str, *, claims: str | None = None, knobs: str = "", **parts: Any
    ) -> Mutant:  # fmt: skip
        title, home = name.title().replace("_", ""), module["__name__"]
        cls = type(title, (twin,), {"__module__": home, "__doc__": story, **parts})
        module[title] = register(name)(cls)
        return Mutant(
            name=name, target=f"{home}:{title}", caught_by=f"test_{caught_by}", story=story, claims=claims, knobs=knobs
        )  # fmt: skip

    return plant


def mutant_kinds() -> tuple[str, ...]:
    """Kinds that have mutants."""
    return tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in _NOT_KINDS))


def all_mutants(kind: str) -> tuple[Mutant, ...]:
    """The mutants of a kind, and those of every kind that are planted in it."""
    from rabbet_sdk.mutants.level_one import LEVEL_ONE

    found: tuple[Mutant, ...] = import_module(f"rabbet_sdk.mutants.{kind}").MUTANTS
    return found + LEVEL_ONE.get(kind, ())
