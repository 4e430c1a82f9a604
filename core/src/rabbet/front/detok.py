"""Token ids to text while they come, and the search for stop strings across token borders."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rabbet.front.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopFinder"]

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that the text goes on from.
_CONTEXT = 6
# A character has at most four bytes, so what is incomplete lies within the last tokens, whatever was before.
_MAX_PENDING = 8
_KEPT_PENDING = 4


class Detokenizer:
    """Turns a growing list of ids into text; what ``feed`` and ``flush`` return, joined, is the text of all ids.

    A character that is spread over tokens comes out with its last byte. Text is decoded from the last point at which
    it was complete, so the work a token does not grow with the output:

        ids      | context: complete, shown | pending: ends inside a character |
        decoded  |--------- shown ----------|-- new text --|-- U+FFFD: held ---|

    Tokenizers that spell unknown characters as byte tokens (``<0xE2>``) turn a whole run of them into replacement
    characters if its end is incomplete, so runs of these are read here, byte by byte.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = ()
    ) -> None:
        """Start after ``prompt_tail``: some tokenizers write the first token of a text without its space."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        # Byte tokens at the prompt's end may belong to a character that it cuts: they are no context.
        tail = prompt_tail[-_CONTEXT:]
        self._ids = [i for i in tail if tokenizer.byte_of(i) is None]
        self._shown = self._decode(self._ids)
        if self._shown.endswith(_REPLACEMENT):
            # The prompt ends inside a character: what completes it is shown alone.
            self._ids, self._shown = [], ""
        self._num_context = len(self._ids)
        if len(self._ids) < len(tail) and not self._shown:
            self._anchor()

    def feed(self, token_ids: Sequence[int]) -> str:
        """New text; empty while a character is incomplete."""
        return "".join(self._feed(token_id) for token_id in token_ids)

    def _feed(self, token_id: int) -> str:
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            # Text that waits for its last byte will not get it from a byte token.
            return self._leave_pending() + self._bytes.decode(bytes((byte,)))
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        if text and not self._shown:
            self._anchor()
        self._ids.append(token_id)
        decoded = self._decode(self._ids)
        if len(decoded) < len(self._shown):
            return text
        is_complete = not decoded.endswith(_REPLACEMENT)
        # Of several replacement characters only the last can still change.
        stable = decoded if is_complete else decoded[: max(len(self._shown), len(decoded) - 1)]
        text += stable[len(self._shown) :]
        self._shown = stable
        if is_complete:
            self._drop_context(self._num_context)
        elif len(self._ids) - self._num_context > _MAX_PENDING:
            self._ids = self._ids[-_KEPT_PENDING:]
            self._shown = self._decode(self._ids)[:-1]
            self._num_context = 0
        return text

    def _drop_context(self, count: int) -> None:
        """All ids are shown: the last piece is context enough, if it has text (what follows may need its space)."""
        piece = self._ids[count:]
        shown = self._decode(piece)
        if shown:
            self._ids, self._shown = piece, shown
        elif all(token_id in self._tokenizer.special_ids for token_id in piece):
            # Skipped tokens leave no trace, and must not pile up.
            self._ids = self._ids[:count]
        self._num_context = len(self._ids)

    def _leave_pending(self) -> str:
        text = self._decode(self._ids)[len(self._shown) :]
        if text or not self._shown:
            self._anchor()
        return text

    def _anchor(self) -> None:
        """Make the next token one in the middle of a text."""
        self._ids = list(self._tokenizer.anchor)
        self._shown = self._decode(self._ids)
        self._num_context = len(self._ids)

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character come out as replacement characters."""
        decoded = self._decode(self._ids)
        text = decoded[len(self._shown) :] + self._bytes.decode(b"", final=True)
        self._bytes.reset()
        self._shown = decoded
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopFinder:
    """Finds the first stop string in text that comes in pieces, and holds back what could become one."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """Look for ``stops``; ``keep`` leaves the one that is found in the text."""
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, is_armed: bool = True) -> str:
        """Text that is safe to show. After a match ``found`` is set and nothing more comes.

        Args:
            text: New text.
            is_armed: Whether a match may end the output yet (``min_tokens``); what came before is never searched again.
        """
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        if not is_armed:
            shown, self._held = self._held + text, ""
            return shown
        self._held += text
        matches = [(position, stop) for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if matches:
            # The earliest match wins; among equals the longest, so that the outcome does not depend on their order.
            position, stop = min(matches, key=lambda item: (item[0] + len(item[1]), item[0]))
            self.found = stop
            shown = self._held[: position + len(stop)] if self._keep else self._held[:position]
            self._held = ""
            return shown
        keep = self._could_begin()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _could_begin(self) -> int:
        """Length of the longest end of the held text that is a beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
