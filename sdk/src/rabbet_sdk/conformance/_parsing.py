"""What the suites of tool and reasoning parsers share: streams cut in any way, put together again, and work that is counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """Eight times the chunks are no more than some eight times the work: lines that run and characters looked at."""

    def work(count: int) -> int:
        parser, meter = make(), _Meter()
        with meter.counting():
            for text in (head, *[unit] * count):
                parser.feed(_Text(text))
            parser.finish()
        return meter.work

    short, long = work(250), work(2000)
    assert long <= 12 * short, f"2,000 chunks are {long / short:.0f} times the work of 250; 8 is linear"


class _Meter:
    """Counts lines of Python, and characters that operations on strings read or copy. No clock: the same each time."""

    running: _Meter | None = None

    def __init__(self) -> None:
        self.work = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread does meanwhile."""
        before = sys.gettrace(), sys.getprofile()
        _Meter.running = self
        sys.settrace(self._line)
        sys.setprofile(self._call)
        try:
            yield
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
            _Meter.running = None

    def _line(self, _frame: Any, event: str, _argument: Any) -> Any:
        self.work += event == "line"
        return self._line

    def _call(self, _frame: Any, event: str, argument: Any) -> None:
        # Strings that are no ``_Text`` any more: joined, formatted, decoded. These methods look at an end only.
        if event == "c_call" and type(getattr(argument, "__self__", None)) is str:
            if argument.__name__ not in ("startswith", "endswith", "join"):
                self.work += len(argument.__self__)


class _Text(str):
    """A string whose operators and methods are counted, and whose parts and sums are such strings again."""

    __slots__ = ()
    __hash__ = str.__hash__


def _count(name: str) -> Callable[..., Any]:
    original = getattr(str, name, None)

    def method(self: str, *arguments: Any) -> Any:
        if original is None:  # ``str`` has no __radd__
            result: Any = str.__add__(arguments[0], self)
        else:
            result = original(self, *arguments)
        if _Meter.running is not None:
            # An end that is looked at costs its own length, a search what it may read, the rest the whole.
            size = len(self)
            if name in ("startswith", "endswith", "join"):
                size = 1
            elif name in ("find", "index", "count", "rfind", "rindex") and len(arguments) > 1:
                size = len(self[slice(*arguments[1:3])])
            _Meter.running.work += len(result) if isinstance(result, str) else size
        return _kept(result)

    return method


def _kept(result: Any) -> Any:
    if isinstance(result, str):
        return _Text(result)
    return type(result)(map(_kept, result)) if isinstance(result, list | tuple) else result


for _name in (
    "__add__", "__radd__", "__getitem__", "__contains__", "__mod__", "__eq__", "__ne__",
    *(name for name in dir(str) if not name.startswith("_") and name not in ("maketrans", "encode", "format")),
):  # fmt: skip
    setattr(_Text, _name, _count(_name))
