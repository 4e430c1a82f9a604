"""Suite of structured-output grammars.

Claims: ``kinds`` (of specifications). Each claimed kind is given a language of a few strings, in which every state can
be visited and what may follow be found by trying all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rabbet.contracts.grammar import GrammarContext, GrammarQuery
from rabbet.errors import InvalidRequestError
from rabbet.types.sampling import StructuredOutputsParams
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.tokenizer import PieceTokenizer

__all__ = ["GrammarConformance"]

_PIECES = (
    *("a", "b", "c", "ab", "bc", "abc", "ca", '"', '"a', 'b"', "aa", "", "é", "x", " ", "\n"),
    *("d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s"),
    *("da", "abd", "</s>"),
)
_END = len(_PIECES) - 1
_VOCAB = 80
"""Longer than the tokenizer, as models pad their vocabularies; three words of bits, of which the last is half used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Language:
    """A specification and all strings that it allows."""

    spec: StructuredOutputsParams
    strings: tuple[str, ...]
    broken: StructuredOutputsParams

    def follow(self, text: str, token: int) -> str | None:
        """The text after ``token``, None where it is not allowed: by trying."""
        if token == _END:
            return text if text in self.strings else None
        piece = _PIECES[token] if token < len(_PIECES) else ""
        fits = piece and any(string.startswith(text + piece) for string in self.strings)
        return text + piece if fits else None

    def paths(self) -> list[tuple[tuple[int, ...], str]]:
        """Every state but those after an end token: tokens that lead there, and the text."""
        found: list[tuple[tuple[int, ...], str]] = [((), "")]
        for tokens, text in found:
            for token in range(_END):
                longer = self.follow(text, token)
                if longer is not None:
                    found.append(((*tokens, token), longer))
        return found


_WORDS = ("ab", "abc", "abd", "cab", "éaa")
_QUOTED = tuple(f'"{word}"' for word in _WORDS)
_LANGUAGES = {
    "choice": _Language(
        spec=StructuredOutputsParams(choice=list(_WORDS)), strings=_WORDS, broken=StructuredOutputsParams(choice=[])
    ),
    "regex": _Language(
        spec=StructuredOutputsParams(regex="ab|ab[cd]|cab|éaa"), strings=_WORDS,
        broken=StructuredOutputsParams(regex="(ab"),
    ),
    "json": _Language(
        spec=StructuredOutputsParams(json={"enum": list(_WORDS)}, disable_any_whitespace=True), strings=_QUOTED,
        broken=StructuredOutputsParams(json="{"),
    ),
    "grammar": _Language(
        spec=StructuredOutputsParams(grammar='root ::= "ab" | "ab" [cd] | "cab" | "éaa"'), strings=_WORDS,
        broken=StructuredOutputsParams(grammar="root ::= ("),
    ),
}  # fmt: skip
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class GrammarConformance(SupportsConformance):
    """Subclass it and set ``plugin``."""

    kind = "grammar"

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Each kind of specification, none, and two at once."""
        queries = [(kind,) for kind in _KINDS] + [(), ("choice", "regex"), ("choice", "structural_tag")]
        return [
            Case(
                id="+".join(kinds) or "none",
                value=GrammarQuery(kinds=frozenset(kinds)),
                unclaimed=", ".join(kind for kind in kinds if not claims.allows("kinds", kind)),
            )
            for kinds in queries
        ]

    @classmethod
    def language_cases(cls, claims: Claims) -> list[Case]:
        """The finite languages."""
        return [
            Case(id=kind, value=language, unclaimed=claims.missing({"kinds": kind}))
            for kind, language in _LANGUAGES.items()
        ]

    def _backend(self, subject: Subject) -> Any:
        context = GrammarContext(tokenizer=PieceTokenizer(_PIECES), vocab_size=_VOCAB, end_token_ids=(_END,))
        return subject.plugin_class(context)

    @cases("language_cases")
    def test_bitmask_is_brute_force(self, subject: Subject, case: Case) -> None:
        """In every state the bits are exactly the tokens that may follow, whatever stood in the row before."""
        backend, language = self._backend(subject), case.value
        for tokens, text in language.paths():
            grammar = backend.compile(language.spec)
            assert grammar.accept(tokens) == len(tokens), f"{text!r} is a beginning, but was not accepted"
            expected = {token for token in range(_VOCAB) if language.follow(text, token) is not None}
            for poison in (-1, 0, 0x55555555):
                got = _bits(grammar, poison)
                assert got == expected, f"after {text!r}: too many {sorted(got - expected)}, missing {expected - got}"

    @cases("language_cases")
    def test_accepts_the_longest_prefix(self, subject: Subject, case: Case) -> None:
        """Up to the first token that is not allowed, ids that are no text among them; an end token after the end."""
        backend, language = self._backend(subject), case.value
        for tokens, text in language.paths():
            for token in range(_VOCAB):
                grammar = backend.compile(language.spec)
                allowed = len(tokens) + (language.follow(text, token) is not None)
                got = grammar.accept([*tokens, token])
                assert got == allowed, f"token {token} after {text!r}: accepted {got} tokens, {allowed} are allowed"

    @cases("language_cases")
    def test_count_accepted_does_not_advance(self, subject: Subject, case: Case) -> None:
        """The number that ``accept`` would take, and nothing changes."""
        backend, language = self._backend(subject), case.value
        for tokens, _ in language.paths():
            grammar = backend.compile(language.spec)
            before = _bits(grammar)
            for more in (tokens, (*tokens, _VOCAB - 1), (*tokens, _END)):
                expected = backend.compile(language.spec).accept(more)
                assert grammar.count_accepted(more) == expected, f"count_accepted({more}) differs from accept"
                assert _bits(grammar) == before, "count_accepted advances the grammar"

    @cases("language_cases")
    def test_rollback_is_exact(self, subject: Subject, case: Case) -> None:
        """Back by any number of tokens, also over an end token, the state is that of the shorter text."""
        backend, language = self._backend(subject), case.value
        for path, text in language.paths():
            tokens = (*path, _END) if text in language.strings else path
            for back in range(len(tokens) + 1):
                grammar = backend.compile(language.spec)
                assert grammar.accept(tokens) == len(tokens)
                grammar.rollback(back)
                fresh = backend.compile(language.spec)
                kept = tokens[: len(tokens) - back]
                fresh.accept(kept)
                same = _bits(grammar) == _bits(fresh) and grammar.is_terminated == fresh.is_terminated
                assert same, f"{back} of {len(tokens)} tokens back: another state than after {kept}"
                assert grammar.accept(tokens[len(kept) :]) == back, "what was rolled back is not accepted again"

    @cases("language_cases")
    def test_terminated_means_only_an_end_token(self, subject: Subject, case: Case) -> None:
        """``is_terminated`` agrees with what may follow."""
        backend, language = self._backend(subject), case.value
        for tokens, text in language.paths():
            grammar = backend.compile(language.spec)
            grammar.accept(tokens)
            only_end = [t for t in range(_VOCAB) if language.follow(text, t) is not None] == [_END]
            assert grammar.is_terminated is only_end, f"after {text!r}: is_terminated is {grammar.is_terminated}"

    @level(3)
    @cases("language_cases")
    def test_requests_share_no_state(self, subject: Subject, case: Case) -> None:
        """Two requests with one specification, and two engines, go their own ways."""
        backend, other, language = self._backend(subject), self._backend(subject), case.value
        first, second, third = (b.compile(language.spec) for b in (backend, backend, other))
        start = _bits(second)
        tokens = language.paths()[-1][0]
        assert first.accept(tokens) == len(tokens)
        assert _bits(second) == start, "a request advances another one with the same specification"
        assert _bits(third) == start == _bits(backend.compile(language.spec)), "a request advances other engines"

    @cases("language_cases")
    def test_broken_specification_is_a_request_error(self, subject: Subject, case: Case) -> None:
        """``InvalidRequestError`` when it is compiled, and the backend goes on."""
        backend = self._backend(subject)
        with pytest.raises(InvalidRequestError) as raised:
            backend.compile(case.value.broken)
        assert str(raised.value).strip(), "the error has no message"
        assert _bits(backend.compile(case.value.spec))


def _bits(grammar: Any, poison: int = -1) -> set[int]:
    """Tokens whose bit is set; the row held ``poison`` before."""
    row = np.full((_VOCAB + 31) // 32, poison, dtype=np.int32)
    grammar.fill_bitmask(row)
    words: Sequence[int] = row.view(np.uint32).tolist()
    return {32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1}
