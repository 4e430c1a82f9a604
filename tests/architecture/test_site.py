"""The site of the documentation: every page is in a table of contents, every link leads somewhere, and it builds."""

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
    *sorted(ROOT.glob("plugins/*/README.md")), *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
INDEX = ROOT / "docs" / "index.md"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Without blocks of code, in which brackets mean something else."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere, or to what is no page and no file."""
    found = []
    for link in LINK.findall(prose(text)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.is_file():
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


def test_the_check_sees_a_link_that_leads_nowhere() -> None:
    text = "[a](nowhere.md) [b](index.md) [c](index.md#no-such) `[d](code.md)`\n```\n[e](code.md)\n```\n"
    assert problems(INDEX, text) == ["nowhere.md: no such file", "index.md#no-such: no such heading"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert not problems(page, page.read_text(encoding="utf-8"))


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
        pytest.skip("sphinx and myst-parser are not installed; the other tests of this file need neither")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "docs.sh"), str(tmp_path)], env=os.environ | {"PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "A hardware platform" in (tmp_path / "docs" / "tutorials" / "platform.html").read_text(encoding="utf-8")
