"""Suite of structured-output grammars.

Claims: ``kinds`` (of specifications). Each claimed kind is given a language of a few strings, in which every state can
be visited and what may follow be found by trying all tokens; JSON objects and structural tags, which have no end of
texts, are walked through at random.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
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
    *("d", "e", "{", "}", ":", ",", "1", "[", "]", "<a>", "</a>", "<", "/", ">", "<a", '":'),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Open:
    """A specification of endlessly many texts.

    Attributes:
        spec: The specification.
        is_whole: Whether a text may end.
        samples: Of each row, which differs in white space only, one text at least is allowed.
        endings: Their suffixes, and closed brackets, make any beginning whole.
    """

    spec: StructuredOutputsParams
    is_whole: Callable[[str], bool]
    samples: tuple[tuple[str, ...], ...]
    endings: tuple[str, ...]

    def is_begun(self, text: str) -> bool:
        """Whether ``text`` can become whole."""
        longer = [text + ending[start:] for ending in self.endings for start in range(len(ending) + 1)]
        return any(self.is_whole(one) or self.is_whole(_closed(one)) for one in longer)


def _closed(text: str) -> str:
    """With the brackets that are open outside of strings."""
    left: list[str] = []
    for mark in re.findall(r'"[^"]*"?|[{}\[\]]', text):
        if mark in ("{", "["):
            left.append("}" if mark == "{" else "]")
        elif mark in ("}", "]") and left:
            left.pop()
    return text + "".join(reversed(left))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


_FREE = r"(?:(?!<a)[\s\S])*"
_TAGGED = re.compile(f'{_FREE}(?:<a>"(?:ab|cab)"</a>{_FREE})*')
_SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["ab", "cab"]}, "b": {"enum": ["c"]}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
_TAG = {"type": "structural_tag", "triggers": ["<a"], "structures": [
    {"begin": "<a>", "schema": {"enum": ["ab", "cab"]}, "end": "</a>"},
]}  # fmt: skip
_OPEN = {
    "json": _Open(
        spec=StructuredOutputsParams(json=_SCHEMA),
        is_whole=lambda text: _is_object(text) and json.loads(text) in [{"a": a, "b": "c"} for a in ("ab", "cab")],
        samples=(('{"a":"ab","b":"c"}', '{"a": "ab", "b": "c"}'), ('{"a":"cab","b":"c"}', '{"a": "cab", "b": "c"}')),
        endings=(
            '{"a":"ab","b":"c"}', '{"a":"cab","b":"c"}', '"b":"c","a":"ab"}', '"b":"c","a":"cab"}',
        ),
    ),
    "json_object": _Open(
        spec=StructuredOutputsParams(json_object=True), is_whole=_is_object,
        samples=(("{}",), ('{"a":1}', '{"a": 1}'), ('{"a":[{},"b"],"c":1}', '{"a": [{}, "b"], "c": 1}')),
        endings=('{"a":1', '"ab"'),
    ),
    "structural_tag": _Open(
        spec=StructuredOutputsParams(structural_tag=json.dumps(_TAG)),
        is_whole=lambda text: _TAGGED.fullmatch(text) is not None,
        samples=(("",), ("x",), ('<a>"ab"</a>',), ('a<b<a>"cab"</a>x<a>"ab"</a>',)),
        endings=('<a>"ab"</a>', '<a>"cab"</a>'),
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

    @classmethod
    def open_cases(cls, claims: Claims) -> list[Case]:
        """The endless languages."""
        return [
            Case(id=kind, value=language, unclaimed=claims.missing({"kinds": kind})) for kind, language in _OPEN.items()
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

    @cases("open_cases")
    def test_samples_are_allowed(self, subject: Subject, case: Case) -> None:
        """Texts that follow the specification, with white space or without, to their end."""
        backend, tokenizer = self._backend(subject), PieceTokenizer(_PIECES)
        for spellings in case.value.samples:
            found = []
            for text in spellings:
                tokens = [*tokenizer.encode(text), _END]
                found.append(backend.compile(case.value.spec).accept(tokens) == len(tokens))
            assert any(found), f"none of {spellings} is allowed"

    @cases("open_cases")
    def test_any_way_through_is_sound(self, subject: Subject, case: Case) -> None:
        """Walks at random: an end token exactly where the text is whole, bits and counts agree, rollback is exact."""
        backend, language = self._backend(subject), case.value
        for seed in range(12):
            grammar, chance, text = backend.compile(language.spec), random.Random(seed), ""
            states: list[set[int]] = []
            depth = 0
            for _ in range(20):
                allowed = _bits(grammar, poison=0x55555555)
                states.append(allowed)
                may_end = language.is_whole(text)
                assert (_END in allowed) is may_end, f"{text!r} is {'' if may_end else 'not '}whole, bits differ"
                taken = {token for token in range(_VOCAB) if grammar.count_accepted([token])}
                assert taken == allowed, f"after {text!r}: bits and count_accepted differ in {sorted(taken ^ allowed)}"
                assert grammar.is_terminated is (allowed == {_END}), f"after {text!r}: is_terminated"
                assert language.is_begun(text), f"{text!r} is allowed, and can never become whole"
                going_on = sorted(allowed - {_END})
                if not going_on:
                    break
                token = chance.choice(going_on)
                assert grammar.accept([token]) == 1
                text += _PIECES[token]
                depth += 1
            for state in reversed(states[:depth]):
                grammar.rollback(1)
                assert _bits(grammar) == state, f"rollback on the way to {text!r} is not exact"

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
