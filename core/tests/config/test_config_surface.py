"""Flags and variables are frozen: a change of ``surface.txt`` is a change that users see.

``python core/tests/config/test_config_surface.py > core/tests/config/surface.txt`` writes the list anew.
"""

from __future__ import annotations

from pathlib import Path

from rabbet.config.flags import SHORT, flags, sections
from rabbet.config.removed import NO_EFFECT, NOT_YET, REMOVED

FROZEN = Path(__file__).parent / "surface.txt"


def surface() -> str:
    """One line a flag: name, variable, default."""
    lines = [f"--{flag.name} {flag.environment} {flag.default!r}" for flag in flags().values()]
    lines += [f"--{name.replace('_', '-')}-config RABBET_{name.upper()}_CONFIG" for name in sections()]
    lines += [f"{short} --{long}" for short, long in SHORT.items()]
    lines += [f"--{name} removed" for name in REMOVED]
    lines += [f"--{name} no effect" for name in NO_EFFECT]
    return "\n".join(["--config RABBET_CONFIG", *sorted(set(lines))]) + "\n"


def test_flags_and_variables_are_those_of_the_checked_in_list() -> None:
    expected, actual = set(FROZEN.read_text(encoding="utf-8").splitlines()), set(surface().splitlines())
    assert not actual - expected, "new or changed; see this file's first lines"
    assert not expected - actual, (
        "gone: users may depend on it; it belongs into REMOVED, then see this file's first lines"
    )


def test_no_option_is_both_there_and_gone() -> None:
    there = set(flags()) | {f"{name.replace('_', '-')}-config" for name in sections()}
    assert not there & (set(REMOVED) | set(NO_EFFECT) | set(NOT_YET))
    assert not set(REMOVED) & set(NOT_YET)


def test_what_replaced_an_option_exists() -> None:
    for name, text in REMOVED.items():
        for word in text.replace("(", " ").replace(")", " ").replace(";", " ").split():
            flag = word.rstrip(".,").replace("_", "-").removeprefix("--no-").removeprefix("--")
            if word.startswith("--") and not flag.startswith("plugin-config."):
                assert flag.lower() in flags(), f"{name} points to {word}"


if __name__ == "__main__":
    print(surface(), end="")
