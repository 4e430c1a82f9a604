"""What the suites of tool and reasoning parsers share: streams cut in any way, put together again, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbet.contracts.parsers import ParsedPiece

__all__ = ["Parsed", "assert_linear", "check_chunkings", "parse"]


@dataclass(kw_only=True, slots=True)
class Parsed:
    """A whole response: texts, and each call as [name, arguments]."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, piece: Any) -> None:
        """Put ``piece`` to the rest; checks the rules of calls."""
        assert isinstance(piece, ParsedPiece), (
            f"a parser gave {type(piece).__name__}; the contract asks for ParsedPiece"
        )
        self.content += piece.content
        self.reasoning += piece.reasoning
        for call in piece.tool_calls:
            if call.index == len(self.calls):
                assert call.name, f"the first piece of call {call.index} has no name"
                self.calls.append([call.name, ""])
            else:
                assert 0 <= call.index < len(self.calls), f"call {call.index} comes before call {len(self.calls)}"
                assert call.name is None, f"call {call.index} is named twice"
            self.calls[call.index][1] += call.arguments


def parse(parser: Any, chunks: Sequence[str]) -> Parsed:
    """Feed all chunks and finish."""
    parsed = Parsed()
    for chunk in chunks:
        parsed.add(parser.feed(chunk))
    parsed.add(parser.finish())
    return parsed


def check_chunkings(make: Callable[[], Any], fragments: Sequence[str], check: Callable[[str, Parsed], None]) -> None:
    """Any text of ``fragments`` gives the same whole, by single characters and in any chunks; ``check`` sees it."""

    @settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(list(fragments)), max_size=9), st.lists(st.integers(0, 12), max_size=24))
    def run(parts: list[str], sizes: list[int]) -> None:
        text = "".join(parts)
        # Half of the texts begin with a start mark: most others hold no mark that counts.
        text = fragments[0] + text if len(parts) % 2 else text
        whole = parse(make(), [text])
        check(text, whole)
        chunks, at = [], 0
        for size in sizes:
            chunks.append(text[at : at + size])
            at += size
        for cut in (list(text), [*chunks, text[at:]]):
            got = parse(make(), cut)
            assert got == whole, f"{text!r} cut as {cut}: {got}; whole: {whole}"

    run()


def assert_linear(make: Callable[[], Any], head: str, unit: str) -> None:
    """Eight times the chunks take no more than some eight times as long (best of three)."""

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            parser = make()
            start = time.perf_counter()
            parser.feed(head)
            for _ in range(count):
                parser.feed(unit)
            parser.finish()
            best = min(best, time.perf_counter() - start)
        return best

    short, long = seconds(4000), seconds(32000)
    assert long <= 24 * short + 0.02, f"32,000 chunks take {long / short:.0f} times as long as 4,000; 8 is linear"
