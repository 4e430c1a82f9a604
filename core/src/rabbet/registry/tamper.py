"""Evidence of plugins that change Rabbet itself: what stands in core's modules, against what stood there at first.

A plugin can do anything to the process that imports it. What it replaces, adds or removes in ``rabbet.*`` (functions,
classes, methods, and the code inside them) is found by identity, told once, and enters the composition's digest.
Looked at when a plugin loads, when its object is built, and when the engine is ready; serving costs nothing.

The record belongs to the process, as its modules do. A change that was undone is no evidence any more.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["evidence", "look", "watch"]

logger = logging.getLogger(__name__)
_UNKNOWN = "(this process)"
_CORE = "rabbet"
_lock = threading.Lock()
_originals: dict[str, tuple[Any, ...]] = {}
"""``module``, ``module:name`` or ``module:class.member`` to what stood there when it was first seen."""
_patches: dict[str, tuple[tuple[Any, ...], str]] = {}
"""Place to what stands there instead, and who put it there."""
_owners: dict[str, str] = {}
"""Top-level module of a plugin to its distribution and version."""
_asked: set[str] = set()
"""Owners whose code was looked for in every place."""


@contextmanager
def watch(owner: str, value: str) -> Iterator[None]:
    """What changes inside is ``owner``'s doing; what changed before is told by the code that stands there now.

    Args:
        owner: Distribution and version.
        value: ``module:qualname`` that is loaded or built.
    """
    top = value.partition(":")[0].partition(".")[0]
    if top == _CORE:
        yield
        return
    if top != "__main__":
        _owners[top] = owner
    look()
    try:
        yield
    finally:
        look(owner)


def evidence() -> tuple[tuple[str, str], ...]:
    """Owner and place of each change that holds now, sorted."""
    look()
    with _lock:
        return tuple(sorted((owner, place) for place, (_, owner) in _patches.items()))


def look(owner: str = "") -> None:
    """Compare; a change that is new is ``owner``'s, or that of the plugin whose code it is."""
    with _lock:
        found = dict(_places())
        changed = _changed(found)
        news: dict[str, list[str]] = {}
        for place, mark in changed.items():
            if place not in _patches or not _is_same(_patches[place][0], mark):
                who = owner or _owners.get(_origin(found.get(place)), _UNKNOWN)
                _patches[place] = (mark, who)
                news.setdefault(who, []).append(place)
        for place in _patches.keys() - changed.keys():
            del _patches[place]
    for who, places in news.items():
        shown = ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
        logger.warning("%s changes Rabbet itself: %s; the digest says so, and --plugins-strict refuses it", who, shown)


def _changed(found: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Places that do not hold what they held, with what they hold; places seen for the first time are remembered."""
    fresh = _owners.keys() - _asked
    _asked.update(fresh)
    changed: dict[str, tuple[Any, ...]] = {}
    new: dict[str, tuple[Any, ...]] = {}
    for place, value in found.items():
        mark = _mark(value)
        if fresh and _origin(value) in fresh:
            # It was there before we first looked: what core holds never comes from a plugin.
            _originals.pop(place, None)
        original = _originals.get(place)
        if original is not None:
            # A function whose inside was changed is told once, where it lives, and not where else it is known.
            is_here = value is not original[0] or getattr(_function(value), "__module__", "") == place.partition(":")[0]
            if is_here and not _is_same(mark, original):
                changed[place] = mark
        elif _origin(value) in _owners or ("." in place.partition(":")[2] and _parent(place) in _originals):
            changed[place] = mark
        else:
            new[place] = mark
    for place in _originals.keys() - found.keys():
        if (parent := _parent(place)) in found and parent not in changed:
            changed[place] = (None,)
    _originals.update(new)
    return changed


def _places() -> Iterator[tuple[str, Any]]:
    """Core's modules that are loaded, what can be called in them, and the methods of their own classes."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] != _CORE or module is None:
            continue
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        yield name, module
        for attribute, value in tuple(vars(module).items()) if isinstance(module, ModuleType) else ():
            if not callable(value):
                continue
            yield f"{name}:{attribute}", value
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in tuple(vars(value).items()):
                    if callable(inner) or isinstance(inner, classmethod | staticmethod | property):
                        yield f"{name}:{attribute}.{member}", inner


def _parent(place: str) -> str:
    module, _, rest = place.partition(":")
    head, dot, _ = rest.rpartition(".")
    return f"{module}:{head}" if dot else module


def _function(value: Any) -> FunctionType | None:
    if type(value) is FunctionType:
        return value
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, partial):
        value = value.func
    return value if isinstance(value, FunctionType) else None


def _mark(value: Any) -> tuple[Any, ...]:
    """What makes a callable do what it does: itself, its code, its defaults. Held, so that no id is used again."""
    function = _function(value)
    if function is None:
        return (value,)
    return (value, function.__code__, function.__defaults__, function.__kwdefaults__)


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    # Pydantic completes a class when it is first used, with functions made anew of the same code.
    first = 1 if len(one) > 1 and _origin(one[0]) == _origin(other[0]) == "pydantic" else 0
    return len(one) == len(other) and all(a is b for a, b in zip(one[first:], other[first:], strict=True))


def _origin(value: Any) -> str:
    """Top-level module whose code this is, whatever name a decorator gave it."""
    function = _function(value)
    if function is not None:
        name = function.__globals__.get("__name__")
    else:
        name = value.__module__ if isinstance(value, type) else type(value).__module__
    return str(name).partition(".")[0]
