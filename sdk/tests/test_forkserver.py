"""Children by fork end as children do: with their code, by their signal, at their deadline, in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rabbet_sdk.conformance.forkserver import start
from rabbet_sdk.environment import child_environment

SHOW = "import os, sys; print(os.getcwd(), os.environ.get('ACME'), sys.argv, 'torch' in sys.modules, 'pytest' in sys.modules)"


def run(tmp_path: Path, *words: str, has_torch: bool = True, **variables: str) -> tuple[int, str]:
    environment = child_environment(**variables)
    output = tmp_path / "output"
    child = start(list(words), env=environment, cwd=tmp_path, output=output, has_torch=has_torch)
    try:
        return child.wait(timeout=60), output.read_text()
    finally:
        child.kill()


def test_a_fork_is_like_a_new_interpreter_that_has_torch(tmp_path: Path) -> None:
    new, forked = (run(tmp_path, "-c", SHOW, "a", has_torch=it, ACME="1") for it in (False, True))
    assert forked == (0, f"{tmp_path} 1 ['-c', 'a'] True False\n")
    assert new == (0, forked[1].replace("True", "False"))
    assert run(tmp_path, "-c", SHOW)[1].split()[1] == "None", "another environment takes another server"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit(3)", 3, ""), ("raise ValueError('bad')", 1, "ValueError: bad"), ("import os; os.abort()", -6, ""),
        ("import atexit; atexit.register(print, 'end')", 0, "end"),
    ],
)  # fmt: skip
def test_each_end_is_told(tmp_path: Path, code: str, status: int, said: str) -> None:
    got, output = run(tmp_path, "-c", code)
    assert got == status and said in output
    assert run(tmp_path, "-c", "print(1)") == (0, "1\n"), "the server lives on"


def test_a_child_that_hangs_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    words = ["-c", "import threading; threading.Event().wait()"]
    child = start(words, env=child_environment(), cwd=tmp_path, output=tmp_path / "output", has_torch=True)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.05)
    child.kill()
    assert child.wait(timeout=30) == -9
    child.kill()
    code, output = run(tmp_path, "-m", "pytest", "--version")
    assert code == 0 and output.startswith("pytest"), sys.version
