"""The types of core, of the SDK and of every plugin hold, strictly: the same command that a contributor runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from source import ROOT, lib_roots, plugin_roots


def test_strict_types(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("mypy", reason="mypy comes with the extra dev")
    sources = [ROOT / "core" / "src", ROOT / "sdk" / "src", *(root / "src" for root in lib_roots() + plugin_roots())]
    # Beside the checkout's own cache, which makes all runs but the first quick; a read-only checkout has none.
    cache = ROOT / ".mypy_cache"
    if not _is_writable(cache):
        cache = tmp_path_factory.mktemp("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache)]
    done = subprocess.run(
        [*command, "--no-error-summary", *map(str, sources)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"mypy says:\n{done.stdout}{done.stderr}"


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(exist_ok=True)
        (directory / ".probe").touch()
        (directory / ".probe").unlink()
    except OSError:
        return False
    return True
