"""Child processes without the seconds that torch takes to import: forks of a process that has imported it and done nothing else.

A fork has its own memory, signals and end, like any child. Used only where the child would import torch anyway; where
something hooks into torch's own import (``torch.backends``), or there is no fork, children are started from nothing.
Run as a program it is the server: a line of JSON on standard input is a job, answered by lines with its process id and,
in the end, with its return code.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, Protocol

__all__ = ["Child", "start"]

_LEFT_OUT = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
"""Variables that may change without a new server."""


class Child(Protocol):
    """What is used of ``subprocess.Popen``."""

    returncode: int | None

    def wait(self, timeout: float | None = None) -> int:
        """Return code, or ``subprocess.TimeoutExpired``."""
        ...

    def kill(self) -> None:
        """End it; no error if it has ended."""
        ...


def start(words: list[str], *, env: dict[str, str], cwd: Path | str, output: Path, has_torch: bool) -> Child:
    """Start Python with ``words`` (``-m module ...`` or ``-c code ...``); nothing on standard input.

    Args:
        words: Arguments of the interpreter.
        env: Environment, with ``PYTHONPATH``.
        cwd: Working directory.
        output: File for both outputs.
        has_torch: The child imports torch in any case, so it may as well be there.
    """
    if has_torch and sys.platform == "linux" and not entry_points(group="torch.backends"):
        if (child := _server_for(env).start(words, env, str(cwd), str(output))) is not None:
            return child
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *words], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


class _Server:
    """The process that forks; one child at a time."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = _kept(env)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, words: list[str], env: dict[str, str], cwd: str, output: str) -> Child | None:
        """None: the server cannot run."""
        jobs, answers = self._process.stdin, self._process.stdout
        assert jobs is not None and answers is not None
        try:
            print(json.dumps([words, env, cwd, output]), file=jobs, flush=True)
            # Opened before the server may wait for it: the handle outlives the number, which would be given to another.
            handle = os.pidfd_open(int(answers.readline()))
            print(file=jobs, flush=True)
        except (BrokenPipeError, ValueError):
            return None
        return _Forked(handle, answers, words)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class _Forked:
    """A child of the server."""

    def __init__(self, handle: int, answers: IO[str], words: list[str]) -> None:
        self.returncode: int | None = None
        self._handle, self._answers, self._words = handle, answers, words

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            os.close(self._handle)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


_server: _Server | None = None


def _kept(env: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if key not in _LEFT_OUT}


def _server_for(env: dict[str, str]) -> _Server:
    """The server; a new one if it has died, or if libraries would have read other variables when they were loaded."""
    global _server
    if _server is None or not _server.is_alive or _server.env != _kept(env):
        _stop()
        _server = _Server(env)
    return _server


@atexit.register
def _stop() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _serve() -> tuple[list[str], str] | None:
    """Fork for each job; returns in each child what it has to run, and in the server at its end nothing."""
    import importlib

    # Nothing of the SDK: pytest rewrites its assertions, which it can do at import only. So this file is run by its path.
    for name in ("torch", "rabbet.layers", "rabbet.registry.catalog", "rabbet.registry.loader"):
        importlib.import_module(name)
    # A child's collector would touch, and so copy, every page of it.
    gc.collect()
    gc.freeze()
    # Kept out of reach of what children print.
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.readline():
        words, env, cwd, output = json.loads(line)
        if (child := os.fork()) == 0:
            answers.close()
            _become(env, cwd, output)
            return words, cwd
        print(child, file=answers, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
    return None


def _become(env: dict[str, str], cwd: str, output: str) -> None:
    """Make a fork look like a new interpreter."""
    import importlib

    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(old, new)
    os.close(written)
    os.close(nothing)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    first = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*first, *(entry for entry in sys.path if entry not in first)]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()


def _run(words: list[str], cwd: str) -> None:
    """As the interpreter does with such arguments."""
    flag, what, *rest = words
    if flag == "-m":
        sys.path.insert(0, cwd)
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert flag == "-c", flag
        sys.argv = ["-c", *rest]
        namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(what, "<string>", "exec"), namespace)


if __name__ == "__main__":
    job = _serve()
    if job is not None:
        _run(*job)
