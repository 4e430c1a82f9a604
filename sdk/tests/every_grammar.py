"""A slow grammar engine for the suite's own specifications, of every kind: a text may go on if some tail makes it whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from rabbet_sdk.conformance.grammar import _LANGUAGES, _OPEN

from rabbet.contracts import Refusal, register_grammar
from rabbet.contracts.grammar import Grammar, GrammarBackend, GrammarQuery
from rabbet.errors import InvalidRequestError

Judge = Callable[[str], bool]
BEGUN = {name: lru_cache(None)(language.is_begun) for name, language in _OPEN.items()}


def starts(strings: Sequence[str], text: str) -> bool:
    return any(one.startswith(text) for one in strings)


def judges(spec: Any) -> tuple[Judge, Judge]:
    """Whether a text is whole, and whether it can become so."""
    for item in _LANGUAGES.values():
        if spec == item.spec:
            return item.strings.__contains__, partial(starts, item.strings)
    for name, other in _OPEN.items():
        if spec == other.spec:
            return other.is_whole, BEGUN[name]
    raise InvalidRequestError(f"{json.dumps(str(spec))} cannot be compiled", field="structured_outputs")


class State(Grammar):
    def __init__(self, backend: Any, is_whole: Judge, is_begun: Judge) -> None:
        self.backend, self.is_whole, self.is_begun = backend, is_whole, is_begun
        self.texts: list[str | None] = [""]

    def follow(self, text: str | None, token: int) -> tuple[bool, str | None]:
        context = self.backend.context
        if text is None or token >= len(context.tokenizer):
            return False, None
        if token in context.end_token_ids:
            return self.is_whole(text), None
        longer = text + context.tokenizer.pieces[token]
        return longer != text and self.is_begun(longer), longer

    def walk(self, token_ids: Sequence[int]) -> list[str | None]:
        found, text = [], self.texts[-1]
        for token in token_ids:
            is_good, text = self.follow(text, token)
            if not is_good:
                break
            found.append(text)
        return found

    def accept(self, token_ids: Sequence[int]) -> int:
        found = self.walk(token_ids)
        self.texts += found
        return len(found)

    def count_accepted(self, token_ids: Sequence[int]) -> int:
        return len(self.walk(token_ids))

    def rollback(self, num_tokens: int) -> None:
        del self.texts[len(self.texts) - num_tokens :]

    def allowed(self) -> list[int]:
        return [token for token in range(self.backend.context.vocab_size) if self.follow(self.texts[-1], token)[0]]

    def fill_bitmask(self, row: Any) -> None:
        words = row.view("uint32")
        words[:] = 0
        for token in self.allowed():
            words[token // 32] |= 1 << token % 32

    @property
    def is_terminated(self) -> bool:
        return self.allowed() == list(self.backend.context.end_token_ids)


@register_grammar("every")
class EveryGrammar(GrammarBackend):
    @classmethod
    def supports(cls, query: GrammarQuery) -> tuple[Refusal, ...]:
        return ()

    def compile(self, spec: Any) -> Grammar:
        return State(self, *judges(spec))
