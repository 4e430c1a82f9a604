"""Compares values with the annotations of the contracts; imports nothing that is not loaded already."""

from __future__ import annotations

import builtins
import collections.abc
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

__all__ = ["hints_of", "mismatch"]

_MAX_ITEMS = 256
"""Items of a long list that are looked at."""


class _Absent:
    """Stands for a module that is not loaded: nothing can be an instance of its classes yet."""

    def __getattr__(self, name: str) -> Any:
        return Any


class _Names(dict[str, Any]):
    """Names that contracts know under ``TYPE_CHECKING`` only, looked up in what is loaded."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in ("torch", "np", "nn"):
            path = {"np": "numpy", "nn": "torch.nn"}.get(name, name)
            return sys.modules.get(path, _Absent())
        for path, module in list(sys.modules.items()):
            if path.startswith(("rabbet.types.", "rabbet.contracts.", "rabbet.layers.", "rabbet.weights.")):
                if isinstance(found := vars(module).get(name), type):
                    return found
        return Any


def hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Parameter to type, and ``return``. What is not loaded yet stands as ``Any``."""
    return _hints(function, frozenset({"torch", "numpy"} & sys.modules.keys()))


@functools.cache
def _hints(function: Callable[..., Any], _loaded: frozenset[str]) -> Mapping[str, Any]:
    return typing.get_type_hints(function, localns=_Names())


def mismatch(value: Any, hint: Any, place: str) -> str:
    """Where and how ``value`` is no ``hint``; empty if it is one."""
    if hint is Any or isinstance(hint, TypeVar):
        return ""
    if hint is None or hint is type(None):
        return "" if value is None else _told(value, "None", place)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return "" if any(not mismatch(value, item, place) for item in args) else _told(value, hint, place)
    if origin is Literal:
        return "" if value in args else _told(value, hint, place)
    if origin is None:
        wanted = (int, float) if hint is float else hint
        return "" if not isinstance(wanted, type | tuple) or isinstance(value, wanted) else _told(value, hint, place)
    if origin is collections.abc.Callable:
        return "" if callable(value) else _told(value, hint, place)
    is_text = isinstance(value, str | bytes) and origin is collections.abc.Sequence
    if not isinstance(value, origin) or is_text:
        return _told(value, hint, place)
    return _items(value, args, place, is_record=origin is tuple and args[-1:] != (Ellipsis,))


def _items(value: Any, args: tuple[Any, ...], place: str, *, is_record: bool) -> str:
    if is_record:
        if len(value) != len(args):
            return f"{place} has {len(value)} items, not {len(args)}"
        pairs = [(f"{place}[{i}]", item, hint) for i, (item, hint) in enumerate(zip(value, args, strict=True))]
    elif isinstance(value, Mapping) and len(args) == 2:
        pairs = [(f"key of {place}", key, args[0]) for key in list(value)[:_MAX_ITEMS]]
        pairs += [(f"{place}[{key!r}]", value[key], args[1]) for key in list(value)[:_MAX_ITEMS]]
    elif isinstance(value, list | tuple | frozenset | set) and args:
        pairs = [(f"{place}[{i}]", item, args[0]) for i, item in enumerate(list(value)[:_MAX_ITEMS])]
    else:
        return ""
    return next((problem for name, item, hint in pairs if (problem := mismatch(item, hint, name))), "")


def _told(value: Any, hint: Any, place: str) -> str:
    wanted = hint.__name__ if isinstance(hint, type) else hint
    return f"{place} is of the type {type(value).__name__}, not {wanted}"
