"""Runs the dangerous tests of a class in one child process; a crash or a hang costs only the test that caused it.

With ``--rabbet-one-child`` it is one child for all classes: the zoo has a class for each mutant and runs one test of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rabbet_sdk.conformance.forkserver import Child, start
from rabbet_sdk.environment import child_environment

__all__ = ["Children"]

_SECONDS_A_TEST = 60


class Children:
    """Reports of dangerous tests, by node id; filled a class at a time."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of ``item``; runs all dangerous tests of its class the first time."""
        if item.nodeid not in self._reports:
            cls, is_shared = getattr(item, "cls", None), self.config.getoption("rabbet_one_child")
            wanted = [
                other
                for other in item.session.items
                if (is_shared or getattr(other, "cls", None) is cls)
                and getattr(getattr(other, "obj", None), "__rabbet_dangerous__", False)
            ]
            self._run(wanted)
        return self._reports[item.nodeid]

    def _run(self, items: list[pytest.Item]) -> None:
        left = {item.nodeid: item for item in items}
        while left:
            started, ending = self._child(list(left.values()))
            done = [nodeid for nodeid in list(left) if self._is_complete(nodeid)]
            for nodeid in done:
                del left[nodeid]
            if not left:
                return
            # What was running when the child ended is to blame; without one, the child could not start at all.
            blamed = [started] if started in left else list(left)
            for nodeid in blamed:
                self._reports[nodeid] = [_dead(left.pop(nodeid), ending)]

    def _is_complete(self, nodeid: str) -> bool:
        return any(report.when == "teardown" for report in self._reports.get(nodeid, ()))

    def _child(self, items: list[pytest.Item]) -> tuple[str, str]:
        """Run ``items`` once; returns the test that had started last, and how the child ended."""
        with tempfile.TemporaryDirectory() as directory:
            results = Path(directory) / "results.jsonl"
            results.touch()
            words = [
                "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={self.config.rootpath}",
                *(["-c", str(self.config.inipath)] if self.config.inipath else []),
                f"--rabbet-child={results}", f"--rabbet-seed={self.config.getoption('rabbet_seed')}",
                *(["--rabbet-first-failure"] if self.config.getoption("rabbet_first_failure") else []),
                *[item.nodeid for item in items],
            ]  # fmt: skip
            output = Path(directory) / "output"
            process = start(
                words,
                env=child_environment(),
                cwd=self.config.rootpath,
                output=output,
                has_torch="torch" in sys.modules,
            )
            try:
                ending = _wait(process, results)
            finally:
                process.kill()
                process.wait()
            text = output.read_text(encoding="utf-8", errors="replace")
            ending = ending or f"crashed: the child ended with {process.returncode}\n{text[-4000:]}"
            return self._read(results), ending

    def _read(self, results: Path) -> str:
        started = ""
        for line in results.read_text(encoding="utf-8").splitlines():
            row: dict[str, Any] = json.loads(line)
            if "start" in row:
                started = row["start"]
                self._reports.pop(started, None)
            else:
                report = pytest.TestReport._from_json(row["report"])
                self._reports.setdefault(report.nodeid, []).append(report)
        return started


def _wait(process: Child, results: Path) -> str:
    """Wait for the child's end as long as its results grow; how it ended, or nothing for an exit of its own."""
    size = -1
    while True:
        try:
            code = process.wait(timeout=_SECONDS_A_TEST)
            return f"crashed: signal {-code}" if code < 0 else ""
        except subprocess.TimeoutExpired:
            if size == (size := results.stat().st_size):
                return f"timeout: no answer within {_SECONDS_A_TEST} s a test"


def _dead(item: pytest.Item, ending: str) -> pytest.TestReport:
    report = pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", longrepr=ending, when="call"
    )
    report.rabbet_outcome = "timeout" if ending.startswith("timeout") else "crashed"  # type: ignore[attr-defined]
    return report
