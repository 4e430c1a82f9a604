"""Text from tokens as they come: right characters, right spaces, stop strings across borders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbet.front.detok import Detokenizer, StopFinder
from rabbet.front.tokenizer import Tokenizer

BYTE_IDS = st.lists(st.integers(0, 261), max_size=40)
FALLBACK_IDS = st.lists(st.integers(0, 266), max_size=40)
TEXTS = (
    "d\u010f",
    "\u65e5\u672c",
    "\U0001f1e8\U0001f1ed",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "a \u20ac b",
    "e\u0301",
)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What comes out for each token, and at the end."""
    return [*(detokenizer.feed([token_id]) for token_id in ids), detokenizer.flush()]


@settings(deadline=None, derandomize=True, max_examples=400)
@given(ids=BYTE_IDS, skip=st.booleans())
def test_any_bytes_in_any_order_join_to_the_text_of_all(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces = stream(Detokenizer(byte_level, skip_special_tokens=skip), ids)
    assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(ids=BYTE_IDS, cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_chunks_change_nothing(byte_level: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    detokenizer, text, rest = Detokenizer(byte_level), "", list(ids)
    for cut in cuts * 40:
        text += detokenizer.feed(rest[:cut])
        rest = rest[cut:]
    assert text + detokenizer.flush() == "".join(stream(Detokenizer(byte_level), ids))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_byte_fallback_gives_the_text_back(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text, add_special_tokens=False)
    assert "".join(stream(Detokenizer(byte_fallback), ids)) == byte_fallback.decode(ids)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(ids=FALLBACK_IDS)
def test_byte_fallback_reads_any_bytes(byte_fallback: Tokenizer, ids: list[int]) -> None:
    """Runs of bytes as Python reads them: characters before an incomplete one are kept."""
    expected, run = "", b""
    for token_id in [*ids, None]:
        byte = byte_fallback.byte_of(token_id) if token_id is not None else None
        if byte is not None:
            run += bytes((byte,))
            continue
        expected, run = expected + run.decode(errors="replace"), b""
        if token_id is not None and token_id not in byte_fallback.special_ids:
            # As the middle of a text, so that no space is cut off.
            expected += byte_fallback.decode([*byte_fallback.anchor, token_id])[1:]
    got = "".join(stream(Detokenizer(byte_fallback), ids))
    assert got == expected or got == expected.removeprefix(" ")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_delta_holds_half_a_character(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_comes_once_at_the_end(byte_level: Tokenizer) -> None:
    ids = [*b"ab", *"\u65e5".encode()[:2]]
    pieces = stream(Detokenizer(byte_level), ids)
    assert pieces == ["a", "b", "", "", "\ufffd"]


def test_a_prompt_that_ends_inside_a_character_is_not_shown(byte_level: Tokenizer) -> None:
    emoji = list("\U0001f600".encode())
    prompt = [*b"Hello world ", *emoji[:-1]]
    pieces = stream(Detokenizer(byte_level, prompt_tail=prompt), [emoji[-1], *b"ok"])
    assert "Hello" not in "".join(pieces) and "".join(pieces).endswith("ok")


def test_the_first_token_keeps_its_space_after_a_prompt(byte_fallback: Tokenizer) -> None:
    hello, world = (byte_fallback.encode(word, add_special_tokens=False) for word in ("Hello", "world"))
    space = [i for i in range(byte_fallback.size) if byte_fallback.decode([*byte_fallback.anchor, i]) == "a world"]
    assert "".join(stream(Detokenizer(byte_fallback, prompt_tail=hello), space)) == " world"
    assert "".join(stream(Detokenizer(byte_fallback), space)) == "world"
    assert world


def test_after_a_prompt_that_ends_in_byte_tokens_a_space_is_kept(byte_fallback: Tokenizer) -> None:
    """Two emoji are eight byte tokens: nothing else is near enough to be the context of what follows."""
    space = next(i for i in range(byte_fallback.size) if byte_fallback.token(i) == " world")
    for prompt in ("Hello\U0001f600\U0001f600", "\U0001f600"):
        ids = byte_fallback.encode(prompt, add_special_tokens=False)
        assert "".join(stream(Detokenizer(byte_fallback, prompt_tail=ids), [space])) == " world"


def test_endless_rubbish_stays_cheap_and_comes_out(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    pieces = [detokenizer.feed([0x80]) for _ in range(1000)]
    assert len(detokenizer._ids) < 20
    assert len("".join(pieces) + detokenizer.flush()) == 1000


def reference(text: str, stops: list[str], *, keep: bool) -> tuple[str, str | None]:
    """The stop that is complete first, found in the whole text."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return (text[:end] if keep else text[: end - len(stop)]), stop
    return text, None


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=10),
    keep=st.booleans(),
)
def test_stops_are_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int], keep: bool) -> None:
    finder, shown, rest = StopFinder(stops, keep=keep), "", text
    for cut in cuts * 30:
        piece = finder.feed(rest[:cut])
        shown, rest = shown + piece, rest[cut:]
        assert finder.found or not any(shown.endswith(stop) for stop in stops)
        if finder.found:
            break
    shown += finder.flush() if finder.found is None else ""
    assert (shown, finder.found) == reference(text, stops, keep=keep)


def test_text_that_only_began_like_a_stop_comes_at_the_end() -> None:
    finder = StopFinder(["END!"])
    assert finder.feed("the EN") == "the "
    assert finder.feed("D") == ""
    assert finder.flush() == "END"


def test_a_stop_before_min_tokens_is_not_searched_again() -> None:
    finder = StopFinder(["x"])
    assert finder.feed("axb", is_armed=False) == "axb"
    assert finder.feed("c") == "c" and finder.found is None
    assert finder.feed("dxe") == "d" and finder.found == "x"
