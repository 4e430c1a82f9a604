"""Token ids to text while they come, and the search for stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence

from rabbet.front.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopFinder"]

_REPLACEMENT = "\ufffd"
_CONTEXT = 6


class Detokenizer:
    """Turns a growing list of ids into text; what ``feed`` and ``flush`` return, joined, is the text of all ids.

    A character that is spread over tokens comes out with its last byte. Text is decoded from the last point at which
    it was complete, so the work a token does not grow with the output.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = ()) -> None:
        """Start after ``prompt_tail``: some tokenizers write the first token of a text without its space."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_tail[-_CONTEXT:])
        self._shown = self._decode(self._ids)
        if self._shown.endswith(_REPLACEMENT):
            # The prompt ends inside a character: what completes it is shown alone.
            self._ids, self._shown = [], ""
        self._complete = len(self._ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        """New text; empty while a character is incomplete."""
        text = ""
        for token_id in token_ids:
            self._ids.append(token_id)
            decoded = self._decode(self._ids)
            if decoded.endswith(_REPLACEMENT) or len(decoded) < len(self._shown):
                continue
            text += decoded[len(self._shown) :]
            # Keep the ids of the last complete piece as context, drop what is before them.
            self._ids = self._ids[self._complete :]
            self._complete = len(self._ids)
            self._shown = self._decode(self._ids)
        return text

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character come out as replacement characters."""
        decoded = self._decode(self._ids)
        text = decoded[len(self._shown) :]
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
