"""Tool parsers with one fault each, on top of the strict twin."""

from __future__ import annotations

from typing import Any

from rabbet.contracts import register_tool_parser
from rabbet.contracts.parsers import ParsedPiece
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.tool_parser import StrictToolParser

__all__ = ["MUTANTS"]


def _plant(name: str, caught_by: str, story: str, **parts: Any) -> Mutant:
    title = name.title().replace("_", "")
    cls = type(title, (StrictToolParser,), {"__module__": __name__, "__doc__": story, **parts})
    globals()[title] = register_tool_parser(name)(cls)
    return Mutant(name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story)


def _forgets_tail(self: Any, text: str, token_ids: Any = ()) -> ParsedPiece:
    found = StrictToolParser.feed(self, text, token_ids)
    self.tail = ""
    return found


def _evaluates(self: Any, body: str) -> Any:
    try:
        eval(body)
    except Exception:  # noqa: BLE001 - the planted fault takes whatever the text does
        return StrictToolParser.read(self, body)
    return StrictToolParser.read(self, body)


def _quadratic(self: Any, text: str, token_ids: Any = ()) -> ParsedPiece:
    found = StrictToolParser.feed(self, text, token_ids)
    "".join(self.parts).count("}")
    return found


MUTANTS = (
    _plant("forgets_tail", "any_chunking_equals_the_whole", "A mark cut in two is lost.", feed=_forgets_tail),
    _plant("evaluates", "text_is_never_evaluated", "eval() of the model's text.", read=_evaluates),
    _plant("drops_open_call", "unfinished_call_is_content", "Swallowed.", finish=lambda _: ParsedPiece()),
    _plant("reads_all_again", "work_is_linear", "Looks at the whole call with each chunk.", feed=_quadratic),
)
"""The zoo of tool parsers."""
