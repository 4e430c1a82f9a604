"""Log probabilities in the shapes of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rabbet.front.outputs import Logprob
from rabbet.front.tokenizer import Tokenizer

__all__ = ["Row", "chat_logprobs", "completion_logprobs", "prompt_logprobs"]

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


def completion_logprobs(
    token_ids: Sequence[int], rows: Sequence[Row | None], *, offset: int, as_ids: bool, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], int]:
    """Completions' form: parallel lists over the tokens; a position without a row (the prompt's first) holds null.

    Args:
        token_ids: The tokens.
        rows: A row for each.
        offset: Where the first token stands in the text, in characters.
        as_ids: Show tokens as ``token_id:N``.
        tokenizer: None shows empty texts.

    Returns:
        The object, and the offset behind the last token.
    """
    tokens, values, top, offsets = [], [], [], []
    for token_id, row in zip(token_ids, rows, strict=True):
        text = tokenizer.token(token_id) if tokenizer is not None else ""
        tokens.append(f"token_id:{token_id}" if as_ids else text)
        values.append(_finite(row[token_id].logprob) if row else None)
        top.append(_alternatives(row, as_ids) if row else None)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}, offset


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
