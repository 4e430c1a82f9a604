"""The suite of grammars on the choice twin, and its oracle against a language worked by hand."""

from __future__ import annotations

from rabbet_sdk.conformance import GrammarConformance
from rabbet_sdk.conformance.grammar import _END, _LANGUAGES, _PIECES
from rabbet_sdk.fakes.tokenizer import PieceTokenizer


class TestStrict(GrammarConformance):
    plugin = "grammar/strict"


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
