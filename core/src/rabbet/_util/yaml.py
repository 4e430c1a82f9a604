"""YAML as a file of options needs it: plain values as YAML 1.2 reads them, keys once, no aliases."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from typing import Any

import yaml

__all__ = ["parse_yaml"]

_PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
}
"""Type to the form of plain words of that type, and their first characters; everything else is text."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1, which the library speaks, takes ``no`` for false, ``010`` for 8, ``1:30`` for 90 and dates for dates."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the library's own form

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """An alias may stand in itself, or for a billion values."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            told = f"*{event.anchor}: aliases are not taken, write the value out"
            raise yaml.composer.ComposerError(None, None, told, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping that has no key twice."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := next((key for key, count in keys.items() if count > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


for _name, (_form, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_form})\Z"), _first)


def parse_yaml(text: str) -> Any:
    """The one document of a text; None if there is none.

    Raises:
        ValueError: Saying in one line what is wrong, and where.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
