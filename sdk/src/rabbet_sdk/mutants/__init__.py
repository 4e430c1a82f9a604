"""The zoo: plugins with one planted fault each. A suite that lets one of them live is not good enough."""

from typing import Any

from rabbet_sdk.mutants.base import Mutant, all_mutants, mutant_kinds

__all__ = ["Kill", "Mutant", "all_mutants", "hunt", "mutant_kinds"]


def __getattr__(name: str) -> Any:
    """The hunt, once it is asked for: it brings the suites, and a mutant must not bring core's private parts with it."""
    if name in ("Kill", "hunt"):
        from rabbet_sdk.mutants import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
