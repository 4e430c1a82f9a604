"""What the command line costs with 200 plugins installed: no plugin's module, no torch, a bounded number of modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHILD = """
import sys, time
started = time.monotonic()
from rabbet.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print(time.monotonic() - started, len(sys.modules), file=sys.stderr)
print(*sorted(name for name in sys.modules if name.startswith("pkg_") or name in ("torch", "transformers", "fastapi")), file=sys.stderr)
"""
COUNT = 200


@pytest.fixture
def crowd(site: Path, fake_dist: Callable[..., str]) -> Path:
    for number in range(COUNT):
        fake_dist(f"crowd-{number}", name=f"crowd_{number}", prelude='raise SystemExit("imported")')
    return site


@pytest.mark.parametrize(("words", "aim_s", "modules"), [(("--help",), 0.3, 380), (("plugins", "list"), 0.5, 380)])
def test_200_plugins_cost_no_import(crowd: Path, words: tuple[str, ...], aim_s: float, modules: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *words],
        env=os.environ | {"PYTHONPATH": str(crowd)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts, imported = done.stderr.splitlines()[-2:]
    seconds, count = facts.split()
    print(f"rabbet {' '.join(words)}: {float(seconds):.2f} s (aim {aim_s} s), {count} modules")
    assert imported == ""
    assert int(count) <= modules
    if words[0] == "plugins":
        assert sum("crowd_" in line for line in done.stdout.splitlines()) == COUNT
