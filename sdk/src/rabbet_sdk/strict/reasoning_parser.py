"""A reasoning parser: what stands between <think> and </think> at the beginning of the text is reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from rabbet.contracts import register_reasoning_parser
from rabbet.contracts.parsers import ParsedPiece, ReasoningParser
from rabbet_sdk.strict import seal

__all__ = ["StrictReasoningParser"]

_START, _END = "<think>", "</think>"


@register_reasoning_parser("strict")
@seal
class StrictReasoningParser(ReasoningParser):
    """Three states, each left for good: before the start mark, inside, after. At most a mark's length is held back."""

    held = ""
    state = "before"

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedPiece:
        """Split ``text``; what may be the beginning of a mark waits."""
        self.held += text
        if self.state == "before":
            if len(self.held) < len(_START) and _START.startswith(self.held):
                return ParsedPiece()
            is_start = self.held.startswith(_START)
            self.held, self.state = self.held.removeprefix(_START), "inside" if is_start else "after"
        reasoning = ""
        if self.state == "inside":
            reasoning, mark, rest = self.held.partition(_END)
            if mark:
                self.held, self.state = rest, "after"
            else:
                keep = max(n for n in range(len(_END)) if reasoning.endswith(_END[:n]))
                cut = len(reasoning) - keep
                reasoning, self.held = reasoning[:cut], reasoning[cut:]
        content, self.held = (self.held, "") if self.state == "after" else ("", self.held)
        return ParsedPiece(reasoning=reasoning, content=content)

    def finish(self) -> ParsedPiece:
        """What was held back is what it would have been without the rest of the mark."""
        held, self.held = self.held, ""
        return ParsedPiece(reasoning=held) if self.state == "inside" else ParsedPiece(content=held)

    def is_reasoning_end(self, token_ids: Sequence[int]) -> bool:
        """Whether the end mark stands in the text of ``token_ids``, however it was split into tokens."""
        return _END in self.tokenizer.decode(list(token_ids))
