"""The help of ``rabbet serve``: options by group, each with its default and its environment variable; searchable."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

from rabbet.config.flags import ALIASES, SHORT, Flag, fields, flags
from rabbet.errors import ConfigError

__all__ = ["print_serve_help"]

_EXAMPLES = """\
Usage: rabbet serve MODEL [OPTIONS]

  rabbet serve ./model --port 8000
  rabbet serve ./model --max-model-len 32K --kv-cache-memory-bytes 4G
  rabbet serve ./model --attention-config.backend=NAME --speculative-config '{"method": "NAME"}'

Sizes take k m g t (powers of 1000) and K M G T (powers of 1024); fractions are allowed. A section is set as JSON
(--cache-config '{"block_size": 16}') or by field (--cache-config.block_size=16); --x.y+ VALUE appends to a list;
--plugin-config.NAME.key=VALUE sets an option of a plugin. Flags win over environment variables, these over a YAML
file (--config FILE or RABBET_CONFIG), this over defaults. --help=WORD shows the options that have the word.
"""


def print_serve_help(word: str = "") -> None:
    """Print all options, or those that have ``word`` in name, group or text.

    Raises:
        ConfigError: If nothing has it.
    """
    groups: dict[str, list[Flag]] = {}
    wanted = word.casefold().replace("_", "-")
    for flag in _unique_flags():
        text = f"{flag.name} {flag.group} {flag.description}".casefold()
        if wanted in ("", "all") or wanted in text:
            groups.setdefault(flag.group, []).append(flag)
    if not groups:
        from rabbet.registry.names import nearest

        close = nearest(word, flags())
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"no option has {word!r} in its name or text{hint}", field="help")
    console = Console(highlight=False)
    if not wanted:
        console.print(_EXAMPLES, markup=False)
    for title, members in groups.items():
        console.print(Text(title, style="bold"))
        for flag in members:
            console.print(_entry(flag, console), soft_wrap=True)


def _unique_flags() -> list[Flag]:
    """Each field once: under its own name, or under the alias that stands for a dotted name."""
    best = {flag.path: flag for flag in fields().values()}
    for alias, path in ALIASES.items():
        if "." in best[path].name:
            best[path] = flags()[alias]
    return list(best.values())


def _entry(flag: Flag, console: Console) -> Text:
    """One option: its name, and beside or below it what it does. No name is ever cut, however narrow the terminal is."""
    name = f"--[no-]{flag.name}" if flag.is_switch else f"--{flag.name}"
    short = next((short for short, long in SHORT.items() if long == flag.name), None)
    detail = f"{flag.description} [default {_shown(flag.default)}, {flag.environment}]"
    indent = min(44, console.width // 3)
    lines = textwrap.wrap(detail, max(console.width - indent, 20), break_long_words=False, break_on_hyphens=False)
    text = f"\n{' ' * indent}".join(lines)
    entry = Text(f"  {short}, {name}" if short else f"  {name}")
    if len(entry) + 2 <= indent:
        entry.pad_right(indent - len(entry))
    else:
        entry.append("\n" + " " * indent)
    aside = text.rindex("[default")
    return entry.append(text[:aside]).append(text[aside:], style="dim")


def _shown(value: Any) -> str:
    if value is None or value is dataclasses.MISSING:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value not in ("", [], {}) else "none"
