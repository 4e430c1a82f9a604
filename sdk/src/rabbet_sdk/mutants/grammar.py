"""Grammars with one fault each, on top of the strict twin."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rabbet.contracts import register_grammar
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.grammar import StrictGrammar, _Choices

__all__ = ["MUTANTS"]


class _Faulty(StrictGrammar):
    """The twin with another state of requests."""

    state: ClassVar[type[_Choices]] = _Choices

    def compile(self, spec: Any) -> Any:
        return self.state(StrictGrammar.compile(self, spec).choices, self)  # type: ignore[attr-defined]


def _plant(
    name: str, caught_by: str, story: str, *, claims: str | None = None, backend: Any = None, **parts: Any
) -> Mutant:
    """Register a backend whose states have ``parts`` in place of the twin's, as an attribute of this module."""
    title = name.title().replace("_", "")
    state = type(f"_{title}State", (_Choices,), parts)
    cls = type(title, (_Faulty,), {"__module__": __name__, "__doc__": story, "state": state, **(backend or {})})
    globals()[title] = register_grammar(name)(cls)
    return Mutant(name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story, claims=claims)


def _old_bits(self: Any, row: np.ndarray) -> None:
    before = row.copy()
    _Choices.fill_bitmask(self, row)
    row |= before


def _count(self: Any, token_ids: Any) -> int:
    return _Choices.accept(self, token_ids)


def _rollback(self: Any, num_tokens: int) -> None:
    _Choices.rollback(self, min(num_tokens, len(self.texts) - 2))


def _all_or_nothing(self: Any, token_ids: Any) -> int:
    return _Choices.accept(self, token_ids) if len(self.walk(token_ids)) == len(token_ids) else 0


_cache: dict[Any, Any] = {}


def _cached(self: Any, spec: Any) -> Any:
    key = tuple(spec.choice)
    if key not in _cache:
        _cache[key] = StrictGrammar.compile(self, spec)
    return _cache[key]


def _key_error(self: Any, spec: Any) -> Any:
    return _Choices([spec.choice[0], *spec.choice[1:]], self)


MUTANTS = (
    _plant("old_bits", "bitmask_is_brute_force", "Bits of the row's last request stay set.", fill_bitmask=_old_bits),
    _plant("count_advances", "count_accepted_does_not_advance", "Counting drafts moves the state.", count_accepted=_count),
    _plant("rollback_stops_early", "rollback_is_exact", "Never back to the beginning.", rollback=_rollback),
    _plant("all_or_nothing", "accepts_the_longest_prefix", "Drops the good tokens too.", accept=_all_or_nothing),
    _plant(
        "terminated_too_early", "terminated_means_only_an_end_token", "Ends at the first choice that fits.",
        is_terminated=property(lambda self: self.texts[-1] in self.choices),
    ),
    _plant("one_state_a_spec", "requests_share_no_state", "Compiled states are shared.", backend={"compile": _cached}),
    _plant("raw_errors", "broken_specification_is_a_request_error", "IndexError.", backend={"compile": _key_error}),
    _plant("claims_regex", "supports_is_honest", "Claims too much.", claims='kinds = ["choice", "regex"]'),
)  # fmt: skip
"""The zoo of grammars."""
