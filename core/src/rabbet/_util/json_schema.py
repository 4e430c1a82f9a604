"""Checks a value against the part of JSON Schema that describes options: types, bounds, choices, nesting."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Problem", "problems"]

Problem = tuple[str, str, str]
"""Path inside the value, what is wrong, and the unknown key if that is it."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_BOUNDS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "exclusiveMinimum": (operator.gt, "more than"),
    "exclusiveMaximum": (operator.lt, "less than"),
}


def problems(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[Problem]:
    """What is wrong with ``value``; nothing if it fits.

    ``type``, ``enum``, ``const``, the four bounds, ``pattern``, ``properties``, ``required``,
    ``additionalProperties`` and ``items`` are checked. Other than in JSON Schema itself, a key that ``properties``
    does not list is wrong unless ``additionalProperties`` allows it: an option with a typing error must not pass.

    **Source**: the JSON Schema draft 2020-12 validation vocabulary, sections 6.1 to 6.5.
    """
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if names and not any(_is_type(value, name) for name in names):
        yield path, f"must be of type {' or '.join(names)}", ""
        return
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None and value not in choices:
        yield path, f"must be {' or '.join(repr(choice) for choice in choices)}", ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        for key, (holds, words) in _BOUNDS.items():
            # A NaN lies within no bounds.
            if key in schema and not holds(value, schema[key]):
                yield path, f"must be {words} {schema[key]}", ""
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield path, f"must match {schema['pattern']}", ""
    if isinstance(value, dict):
        yield from _object(value, schema, path)
    if isinstance(value, list | tuple) and isinstance(schema.get("items"), Mapping):
        for position, item in enumerate(value):
            yield from problems(item, schema["items"], f"{path}[{position}]")


def _object(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[Problem]:
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", "properties" not in schema)
    for key in schema.get("required", ()):
        if key not in value:
            yield path, f"lacks {key!r}", ""
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        if key in known:
            yield from problems(item, known[key], inner)
        elif isinstance(others, Mapping):
            yield from problems(item, others, inner)
        elif not others:
            yield inner, "is no option", key


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ()))
