"""Log probabilities in the shapes of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rabbet.front.detok import Detokenizer
from rabbet.front.outputs import Logprob
from rabbet.front.tokenizer import Tokenizer

__all__ = ["Row", "TextOffsets", "chat_logprobs", "completion_logprobs", "prompt_logprobs", "prompt_offsets"]

Row = dict[int, Logprob]
"""One position: the chosen token first, then the alternatives."""

_LOWEST = -9999.0
"""Stands for minus infinity, which a filter or mask makes of a token and JSON has no number for."""


def chat_logprobs(
    token_ids: Sequence[int], rows: Sequence[Row], *, count: int, as_ids: bool, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Chat's form: an entry a token, with its bytes and exactly ``count`` alternatives, likeliest first."""
    entries = []
    for token_id, row in zip(token_ids, rows, strict=True):
        entry = _entry(token_id, row[token_id], as_ids, tokenizer)
        entry["top_logprobs"] = [_entry(key, value, as_ids, tokenizer) for key, value in _sorted(row)[:count]]
        entries.append(entry)
    return {"content": entries}


def _sorted(row: Row) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))


def _entry(token_id: int, value: Logprob, as_ids: bool, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = value.decoded_token or ""
    return {
        "token": f"token_id:{token_id}" if as_ids else text,
        "logprob": _finite(value.logprob),
        "bytes": _bytes(token_id, text, tokenizer),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _bytes(token_id: int, text: str, tokenizer: Tokenizer | None) -> list[int] | None:
    """The token's bytes; None where it is a part of a character whose bytes are not known."""
    known = tokenizer.bytes_of(token_id) if tokenizer is not None else text.encode("utf-8", "surrogatepass")
    return None if known is None else list(known)


class TextOffsets:
    """Where tokens begin in a text that is returned, in characters.

    Tokens alone do not tell: a special one may not be shown, the first of a text may lose its space, and several may
    share a character.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> None:
        """``prompt`` is what stands before the first token that is fed."""
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail=prompt) if tokenizer else None
        )

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token completes; empty inside a character."""
        return [self._detokenizer.feed([token_id]) if self._detokenizer else "" for token_id in token_ids]

    def after(self, start: int, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Offsets of tokens that go on at ``start``, and where their text ends."""
        *offsets, end = accumulate(map(len, self.pieces(token_ids)), initial=start)
        return offsets, end


def prompt_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Where a prompt's tokens begin in its text; what a text does not show (its start token) is at the next one's place."""
    offsets, place = [], 0
    for piece in TextOffsets(tokenizer, skip_special_tokens=False).pieces(token_ids):
        offsets.append(place)
        if not text.startswith(piece, place):
            piece = piece.lstrip(" ")
        if text.startswith(piece, place):
            place += len(piece)
    return offsets


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[Row | None],
    *,
    offsets: Sequence[int],
    as_ids: bool,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Completions' form: parallel lists over the tokens; a position without a row (the prompt's first) holds null.

    Args:
        token_ids: The tokens.
        rows: A row for each.
        offsets: Where each begins in the text, in characters.
        as_ids: Show tokens as ``token_id:N``.
        tokenizer: None shows empty texts.
    """
    tokens, values, top = [], [], []
    for token_id, row in zip(token_ids, rows, strict=True):
        text = tokenizer.token(token_id) if tokenizer is not None else ""
        tokens.append(f"token_id:{token_id}" if as_ids else text)
        values.append(_finite(row[token_id].logprob) if row else None)
        top.append(_alternatives(row, as_ids) if row else None)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": list(offsets)}


def _alternatives(row: Row, as_ids: bool) -> dict[str, float]:
    """Likeliest first, by text; where two ids read the same, later ones are shown by id so that none is lost."""
    found: dict[str, float] = {}
    for token_id, entry in _sorted(row):
        text = f"token_id:{token_id}" if as_ids else entry.decoded_token or ""
        found[text if text not in found else f"token_id:{token_id}"] = _finite(entry.logprob)
    return found


def prompt_logprobs(rows: Sequence[Row | None]) -> list[dict[str, Any] | None]:
    """The field's form for prompts: for each position a map from id, None for the first."""
    return [
        None
        if row is None
        else {
            str(key): {"logprob": _finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
            for key, value in row.items()
        }
        for row in rows
    ]
