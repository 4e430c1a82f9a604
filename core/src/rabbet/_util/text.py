"""Turns text that a user wrote into a value of a given type: sizes, switches, lists, JSON with sizes.

What is wrong is a ``ValueError`` whose message goes on from the name of the option: "is 'x', but must be ...".
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

__all__ = ["check_plain", "json_with_sizes", "kinds_of", "parse_size", "parse_text", "scalar"]

_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgtKMGT])")
_INTEGER = re.compile(r"-?\d+(?:(?:\.\d+)?[kmgtKMGT])?")
_FACTORS: dict[str, int] = {letter: 1000**power for power, letter in enumerate("kmgt", 1)} | {
    letter: 1024**power for power, letter in enumerate("KMGT", 1)
}
_OUTSIDE_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|(?<![\w.])[+-]?\d+(?:\.\d+)?[kmgtKMGT](?![\w.])')
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_MAX_SHOWN = 64
_MAX_KEYS = 2000
_MAX_DEPTH = 64


def parse_size(text: str, *, words: tuple[str, ...] = ()) -> int:
    """An integer; ``k m g t`` after it are powers of 1000, ``K M G T`` powers of 1024, and fractions are allowed.

    What a fraction leaves over is dropped: 1.3K is 1331.

    Raises:
        ValueError: Naming the ``words`` that are taken besides.
    """
    stripped = text.strip()
    match = _SIZE.fullmatch(stripped)
    try:
        stripped.encode("ascii")  # int() takes the digits of all scripts
        if match is None:
            return int(stripped)
        number, letter = match.groups()
        whole, _, fraction = number.partition(".")
        # Rounded towards zero, for a negative number too.
        sign = -1 if number.startswith("-") else 1
        exact: int = sign * (abs(int(whole + fraction)) * _FACTORS[letter] // 10 ** len(fraction))
        return exact
    except ValueError:
        # Also for numbers of more digits than Python converts.
        more = "".join(f", or {word}" for word in words)
        raise ValueError(
            f"is {_shown(text)}, but must be an integer; k m g t (1000) and K M G T (1024) may follow it{more}"
        ) from None


def json_with_sizes(text: str) -> Any:
    """A JSON document in which unquoted numbers may carry a size suffix; a key that stands twice is refused.

    Raises:
        ValueError: Saying where it stops being JSON.
    """

    def replace(match: re.Match[str]) -> str:
        token = match.group()
        return token if token.startswith('"') else str(parse_size(token))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"has the key {_shown(key)} twice; keep one of them")
            found[key] = value
        return found

    try:
        return json.loads(_OUTSIDE_STRINGS.sub(replace, text), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no valid JSON: {error.msg} at character {error.pos} of {_shown(text)}") from None
    except RecursionError:
        raise ValueError("is no valid JSON: it is nested too deeply") from None


def scalar(text: str) -> Any:
    """What the text is as JSON, or the text itself where it is none: the value of a key that has no schema.

    Raises:
        ValueError: If it starts like a JSON object or array, but is none.
    """
    try:
        return json_with_sizes(text)
    except ValueError:
        if text.lstrip().startswith(("{", "[")):
            raise
        return text


def check_plain(value: Any) -> None:
    """Refuse what cannot be told to another process, or would take too long: an option goes through JSON and msgpack.

    Raises:
        ValueError: Naming the value and the limit.
    """
    num_keys = 0
    waiting: list[tuple[Any, str, int]] = [(value, "", 0)]
    while waiting:
        item, where, depth = waiting.pop()
        verb = "holds" if depth else "is"
        if isinstance(item, Mapping | list | tuple):
            pairs = item.items() if isinstance(item, Mapping) else [(None, inner) for inner in item]
            num_keys += len(item) if isinstance(item, Mapping) else 0
            if depth == _MAX_DEPTH or num_keys > _MAX_KEYS:
                raise ValueError(f"holds too much: at most {_MAX_DEPTH} levels and {_MAX_KEYS} keys are taken")
            for key, inner in pairs:
                named = where if key is None else f" under {_shown(str(key))}"
                waiting += [(str(key), "", depth + 1), (inner, named, depth + 1)]
        elif isinstance(item, str):
            if re.search("[\0\ud800-\udfff]", item):
                raise ValueError(
                    f"{verb} {_shown(item)}{where}, but text holds no NUL and no half characters (use UTF-8)"
                )
        elif isinstance(item, int):
            if not -(1 << 63) <= item < 1 << 63:
                shown = str(item) if item.bit_length() < 200 else f"an integer of {item.bit_length()} bits"
                raise ValueError(f"{verb} {shown}{where}, but must lie between -2^63 and 2^63 - 1")
        elif isinstance(item, float):
            if depth and not math.isfinite(item):
                raise ValueError(f"{verb} {item}{where}, but numbers must be finite")
        elif depth and item is not None:
            told = "use text, numbers, true, false, lists and mappings"
            raise ValueError(f"holds a {type(item).__name__}{where}; {told}")


def kinds_of(annotation: Any) -> set[Any]:
    """The plain types inside an annotation: ``int | Literal["auto"] | None`` gives ``{int, "auto", None}``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return set().union(*(kinds_of(item) for item in get_args(annotation)))
    if origin is Literal:
        return set(get_args(annotation))
    if annotation is type(None):
        return {None}
    return {origin or annotation}


def parse_text(text: str, annotation: Any) -> Any:
    """The value of ``text`` for a field of type ``annotation``.

    Raises:
        ValueError: Naming the text and what it must be.
    """
    kinds = kinds_of(annotation)
    lowered = text.strip().casefold()
    if None in kinds and lowered in ("none", "null"):
        return None
    if bool in kinds:
        if lowered in _TRUE + _FALSE:
            return lowered in _TRUE
        raise ValueError(f"is {_shown(text)}, but must be true or false")
    literals = [kind for kind in kinds if isinstance(kind, str)]
    if lowered in literals:
        return lowered
    if text in literals:
        return text
    if dict in kinds:
        return _mapping(text, annotation)
    if list in kinds:
        return _listing(text, annotation)
    if int in kinds or any(isinstance(kind, int) for kind in kinds):
        return parse_size(text, words=tuple(sorted(literals)))
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"is {_shown(text)}, but must be a number") from None
    return text


def _mapping(text: str, annotation: Any) -> Any:
    if text.lstrip().startswith("{"):
        return json_with_sizes(text)
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"is {_shown(text)}, but must be a JSON object or key=value")
    inner = get_args(annotation)[1:]
    if inner and dict in kinds_of(inner[0]) and "." in key:
        head, _, key = key.partition(".")
        return {head.strip(): {key.strip(): scalar(value)}}
    return {key.strip(): value.strip() if inner == (str,) else scalar(value)}


def _listing(text: str, annotation: Any) -> Any:
    if text.lstrip().startswith("["):
        return json_with_sizes(text)
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not _holds_ints(annotation):
        return items
    return [parse_size(item) if _INTEGER.fullmatch(item) else item for item in items]


def _holds_ints(annotation: Any) -> bool:
    return any(
        int in kinds_of(item)
        for option in (get_args(annotation) or (annotation,))
        for item in (get_args(option) if get_origin(option) is list else (option,))
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
