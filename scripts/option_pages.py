#!/usr/bin/env python3
"""Write docs/options.md: every option with its variable and default, from the schema.

python scripts/option_pages.py          write the page
python scripts/option_pages.py --check  fail if it is out of date
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rabbet.config.flags import ALIASES, SHORT, Flag, fields

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

<!-- Written by scripts/option_pages.py from config/schema.py; change that. -->

Every option of `rabbet serve`, with the environment variable that sets it and its default. The keys of a YAML file
(`--config`) are the flags without dashes in front. A switch also has a form with `no-`.
"""


def shown(value: Any) -> str:
    """A default as a cell; what is empty says nothing."""
    if value is None or value in ("", [], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row(flag: Flag) -> str:
    """One option."""
    shorts = [short for short, name in SHORT.items() if name == flag.name]
    others = [f"--{alias}" for alias, path in ALIASES.items() if path == flag.path]
    names = ", ".join(f"`{name}`" for name in [f"--{flag.name}", *shorts, *others])
    cells = (names, f"`{flag.environment}`", shown(flag.default), flag.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """The whole page."""
    groups: dict[str, list[str]] = defaultdict(list)
    for flag in fields().values():
        groups[flag.group].append(row(flag))
    parts = [HEAD]
    for title, rows in groups.items():
        parts.append(
            f"## {title}\n\n| flag | variable | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def main() -> int:
    """Write or check."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/options.md is out of date; run python scripts/option_pages.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
