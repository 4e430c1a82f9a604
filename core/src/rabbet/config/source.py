"""The values of one source of options, each with the spelling that set it, and how sources lie over one another."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rabbet.errors import ConfigError

__all__ = ["Place", "Setting", "Source", "merge", "nest"]

logger = logging.getLogger(__name__)

Place = tuple[str, ...]
"""Where a value goes: section, field, and keys inside a mapping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value.

    Attributes:
        value: The value; mappings are taken apart, so this is no mapping unless it is empty.
        spelling: What the user wrote: a flag, a variable, a key, a keyword.
        is_append: The items go behind those of the sources below.
    """

    value: Any
    spelling: str
    is_append: bool = False


@dataclass(slots=True)
class Source:
    """All values of the flags, of the environment, of a file, or of keyword arguments."""

    settings: dict[Place, Setting] = field(default_factory=dict)

    def set(self, place: Place, value: Any, spelling: str, *, is_append: bool = False) -> None:
        """Set one value. Mappings set each of their keys; lists under one spelling collect.

        Raises:
            ConfigError: If another spelling has set the same place, or a part of it.
        """
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                self.set((*place, str(key)), item, spelling)
            return
        for other in [other for other in self.settings if _overlap(other, place)]:
            self._meet(place, other, spelling, is_append=is_append)
        known = self.settings.get(place)
        if known is not None:
            if isinstance(value, list) and isinstance(known.value, list):
                value, is_append = [*known.value, *value], known.is_append
            elif value != known.value:
                logger.warning("%s is given more than once; the last value counts", spelling)
        self.settings[place] = Setting(value=value, spelling=spelling, is_append=is_append)

    def _meet(self, place: Place, other: Place, spelling: str, *, is_append: bool) -> None:
        """Refuse a second spelling; let a value replace what it contains, or is contained in."""
        known = self.settings[other]
        # --x.y+ adds to --x.y and to the JSON of --x: that is no second value.
        is_addition = (is_append or known.is_append) and _head(known.spelling) == _head(spelling)
        if known.spelling != spelling and not is_addition:
            raise ConfigError(
                f"{known.spelling} and {spelling} set the same option; keep one of them", field=".".join(place)
            )
        if other != place:
            del self.settings[other]


def merge(sources: Sequence[Source]) -> dict[Place, Setting]:
    """Settings of all sources, the strongest first: a place has the value of the strongest that sets it."""
    merged: dict[Place, Setting] = {}
    for source in reversed(sources):
        for place, setting in source.settings.items():
            below = merged.get(place)
            if setting.is_append and below is not None and isinstance(below.value, list):
                setting = Setting(value=[*below.value, *setting.value], spelling=setting.spelling)
            for other in [other for other in merged if _overlap(other, place)]:
                del merged[other]
            merged[place] = setting
    return merged


def nest(settings: Mapping[Place, Setting]) -> dict[str, Any]:
    """The values as a tree of dictionaries."""
    tree: dict[str, Any] = {}
    for place, setting in settings.items():
        branch = tree
        for key in place[:-1]:
            branch = branch.setdefault(key, {})
        branch[place[-1]] = setting.value
    return tree


def _overlap(one: Place, other: Place) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _head(spelling: str) -> str:
    return spelling.removesuffix("+").partition(".")[0]
