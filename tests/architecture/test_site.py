"""The site of the documentation: every page is in a table of contents, and it builds. Links: tests/docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from source import ROOT

PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "sdk" / "README.md",
    *sorted(ROOT.glob("libs/*/README.md")), *sorted(ROOT.glob("plugins/*/README.md")), *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
INDEX = ROOT / "docs" / "index.md"
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_each_page_is_in_a_table_of_contents() -> None:
    listed: set[Path] = {INDEX}
    for body in TOCTREE.findall(INDEX.read_text(encoding="utf-8")):
        for line in filter(None, (line.strip() for line in body.splitlines())):
            if line.startswith(":"):
                continue
            base, pattern = (ROOT, line.removeprefix("../")) if line.startswith("../") else (INDEX.parent, line)
            hits = list(base.glob(f"{pattern}.md"))
            assert hits, f"{line} names no page"
            listed.update(hits)
    assert not sorted(str(page.relative_to(ROOT)) for page in set(PAGES) - listed)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if find_spec("sphinx") is None or find_spec("myst_parser") is None:
        pytest.skip("sphinx and myst-parser are not installed; tables of contents and links are tested without them")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "docs.sh"), str(tmp_path)], env=os.environ | {"PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "A hardware platform" in (tmp_path / "docs" / "tutorials" / "platform.html").read_text(encoding="utf-8")
