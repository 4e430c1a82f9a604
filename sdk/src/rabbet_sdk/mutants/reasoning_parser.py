"""Reasoning parsers with one fault each, on top of the strict twin."""

from __future__ import annotations

from typing import Any

from rabbet.contracts import register_reasoning_parser
from rabbet.contracts.parsers import ParsedPiece
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.reasoning_parser import StrictReasoningParser

__all__ = ["MUTANTS"]


def _plant(name: str, caught_by: str, story: str, **parts: Any) -> Mutant:
    title = name.title().replace("_", "")
    cls = type(title, (StrictReasoningParser,), {"__module__": __name__, "__doc__": story, **parts})
    globals()[title] = register_reasoning_parser(name)(cls)
    return Mutant(name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story)


def _gives_all(self: Any, text: str, token_ids: Any = ()) -> ParsedPiece:
    found = StrictReasoningParser.feed(self, text, token_ids)
    if self.state == "inside":
        found, self.held = ParsedPiece(reasoning=found.reasoning + self.held), ""
    return found


MUTANTS = (
    _plant("holds_nothing_back", "any_chunking_equals_the_whole", "A mark cut in two is missed.", feed=_gives_all),
    _plant("loses_held", "splits_reasoning_from_content", "What is held is lost.", finish=lambda _: ParsedPiece()),
    _plant(
        "last_token_only", "reasoning_end_is_seen_in_tokens", "Looks at the last id only.",
        is_reasoning_end=lambda self, ids: self.tokenizer.decode(list(ids[-1:])) == "</think>",
    ),
)  # fmt: skip
"""The zoo of reasoning parsers."""
