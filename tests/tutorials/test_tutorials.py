"""Each tutorial, pasted: its bash blocks run in order in one shell, in an empty directory, and print what the page shows.

A ``text`` block behind a ``bash`` block is what that one prints, or a part of it: its lines come in this order, ``...``
stands for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
TUTORIALS = [page for page in PAGES if page.name != "README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "@@ end of block"


@dataclass(frozen=True)
class Block:
    code: str
    shown: str


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    for language, body in FENCE.findall(text):
        if language == "bash":
            found.append(Block(body, ""))
        elif language == "text":
            assert found and not found[-1].shown, "a text block stands behind the bash block whose output it shows"
            found[-1] = Block(found[-1].code, body)
        else:
            assert language in ("python", "toml"), f"a block of {language!r} is neither run nor shown"
    return found


def missing_line(shown: str, output: str) -> str | None:
    """The first line of ``shown`` that the output lacks, in this order."""
    rest = [" ".join(line.split()) for line in output.splitlines()]
    for line in filter(None, (" ".join(item.split()) for item in shown.splitlines())):
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in line.split("...")))
        place = next((number for number, have in enumerate(rest) if pattern.search(have)), None)
        if place is None:
            return line
        rest = rest[place + 1 :]
    return None


def test_the_runner_sees_what_a_page_shows_in_vain() -> None:
    (first, second) = blocks("```bash\na\n```\nx\n```text\nout 1 ... s\n```\n\n```bash\nb\n```\n")
    assert first == Block("a\n", "out 1 ... s\n") and second == Block("b\n", "")
    assert missing_line("b\nd ... f", "a\nb\nc\nd  e f") is None
    assert missing_line("d\nb", "b\nd") == "b"


def test_there_is_a_tutorial_for_each_story() -> None:
    assert {page.stem for page in TUTORIALS} >= {"quantization", "platform", "proposer", "model"}


def paste(page: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the bash blocks of a page, each followed by ``MARK``."""
    (directory / "home").mkdir()
    (directory / "work").mkdir()
    script = "set -eo pipefail\n" + "".join(f"{step.code}\necho '{MARK}'\n" for step in blocks(page.read_text(encoding="utf-8")))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RABBET", "PYTHON"))}
    environment |= {
        "HOME": str(directory / "home"), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-c", script], cwd=directory / "work", env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pasted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[Any]]]:
    """All pages that are asked for, two at a time: a page mostly waits for one interpreter after another to begin."""
    pages = [item.callspec.params["page"] for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield {page: pool.submit(paste, page, tmp_path_factory.mktemp(page.stem)) for page in pages}


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_stands(page: Path, pasted: dict[Path, Future[Any]]) -> None:
    steps = blocks(page.read_text(encoding="utf-8"))
    assert steps
    done = pasted[page].result()
    *outputs, rest = done.stdout.split(f"{MARK}\n")
    assert done.returncode == 0, f"block {len(outputs) + 1} of {page.name}:\n{steps[len(outputs)].code}\n{rest[-4000:]}"
    for number, (step, output) in enumerate(zip(steps, outputs, strict=True), 1):
        lacking = missing_line(step.shown, output)
        assert lacking is None, f"block {number} of {page.name} does not print {lacking!r}:\n{step.code}\n{output[-4000:]}"
