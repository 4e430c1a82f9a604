"""The suite of grammars on the choice twin, and its oracle against a language worked by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rabbet_sdk.conformance import GrammarConformance
from rabbet_sdk.conformance.cases import Case, Claims
from rabbet_sdk.conformance.grammar import _END, _KINDS, _LANGUAGES, _OPEN, _PIECES
from rabbet_sdk.conformance.subject import load_subject
from rabbet_sdk.fakes.dist import write_distribution
from rabbet_sdk.fakes.tokenizer import PieceTokenizer

SOURCE = Path(__file__).with_name("every_grammar.py")


def _install() -> None:
    """Beside the twins, which stand first on the path while tests are collected."""
    site = next(Path(entry) for entry in sys.path if (Path(entry) / "rabbet_strict").is_dir())
    if not (site / "every_grammar").exists():
        provides, modules = {"grammar/every": "every_grammar.plugin:EveryGrammar"}, {"plugin.py": SOURCE.read_text()}
        write_distribution(site, "every-grammar", provides=provides, modules=modules)


_install()


class TestStrict(GrammarConformance):
    plugin = "grammar/strict"


class TestEveryKind(GrammarConformance):
    plugin = "grammar/every"


def test_every_kind_of_request_has_cases() -> None:
    cases = [*GrammarConformance.language_cases(Claims({})), *GrammarConformance.open_cases(Claims({}))]
    assert {case.id for case in cases} == set(_KINDS) and not any(case.unclaimed for case in cases)


@pytest.mark.parametrize("kind", _OPEN)
@pytest.mark.parametrize("fault", ["ends_early", "narrow", "loose", "back_too_far"])
def test_faults_in_endless_languages_are_seen(kind: str, fault: str) -> None:
    every: Any = sys.modules[load_subject("grammar/every").plugin_class.__module__]

    class Faulty(every.State):  # type: ignore[misc, name-defined]
        def follow(self, text: Any, token: int) -> Any:
            is_good, longer = every.State.follow(self, text, token)
            if fault == "ends_early" and token == _END and text is not None and len(text) == 2:
                return True, None
            if fault == "narrow" and token < _END and "c" in _PIECES[token]:
                return False, None
            if fault == "loose" and text is not None and token < _END and _PIECES[token] and text:
                return True, text + _PIECES[token]
            return is_good, longer

        def rollback(self, num_tokens: int) -> None:
            every.State.rollback(
                self, num_tokens + (fault == "back_too_far" and len(self.texts) == 4 and num_tokens < 3)
            )

    backend = type("Backend", (every.EveryGrammar,), {"compile": lambda self, spec: Faulty(self, *every.judges(spec))})
    subject: Any = SimpleNamespace(plugin_class=backend)
    suite, case = GrammarConformance(), Case(id=kind, value=_OPEN[kind])
    with pytest.raises((AssertionError, IndexError)):
        suite.test_samples_are_allowed(subject, case)
        suite.test_any_way_through_is_sound(subject, case)


def test_what_may_follow_by_hand() -> None:
    language = _LANGUAGES["choice"]
    after = {text: {_PIECES[t] for t in range(_END + 1) if language.follow(text, t) is not None} for text in ("", "ab")}
    assert after == {"": {"a", "ab", "abc", "abd", "c", "ca", "é"}, "ab": {"c", "d", "</s>"}}
    # a+b+c, a+bc, ab+c, abc.
    assert [text for _, text in language.paths()].count("abc") == 4


def test_piece_tokenizer() -> None:
    tokenizer = PieceTokenizer(["a", "ab", "", "c"])
    assert tokenizer.encode("abca") == [1, 3, 0]
    assert tokenizer.decode([1, 3, 0]) == "abca"


def test_beginnings_by_hand() -> None:
    begun = {
        "json": ("", "{", '{ "a"', '{"a":"c', '{"b":"c","a":"ab"'),
        "json_object": ("", '{"é', '{"a":[{}', '{"a":[1,', "{}", "{ \n"),
        "structural_tag": ("", "x<", "<a", "<a>", '<a>"c', '<a>"ab"</a>b<a>'),
    }
    never = {
        "json": ("}", "[", '{"c', '{"a":"b', '{"a":"ab"}'),
        "json_object": ("[", '"', "{,", '{"a",', "{}1", "{1"),
        "structural_tag": ("<ab", "<a>x", '<a>"b', '<a>"ab"<a', '<a>"ab"</a><ab'),
    }
    for kind, language in _OPEN.items():
        assert [text for text in begun[kind] if not language.is_begun(text)] == []
        assert [text for text in never[kind] if language.is_begun(text)] == []
