"""The rules of the suites themselves: what is deleted, softened, excused too long or crashes never passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HEAD = """
import os, signal
import pytest
from rabbet_sdk.conformance import QuantizationConformance, dangerous, unclaimed, xfail
"""


def outcomes(tmp_path: Path, body: str, *arguments: str) -> tuple[dict[str, str], str]:
    """Run a test file in a process of its own; outcome of each test, and what pytest wrote."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(HEAD + body)
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rabbet-report={report}",
        *arguments,
        "test_it.py",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    rows = json.loads(report.read_text())["tests"]
    return {row["test"]: row["outcome"] for row in rows}, done.stdout


SOFTENED = {
    "Deleted": ("    test_import_is_quiet = None\n", "test_import_is_quiet"),
    "Overridden": ("    def test_import_is_quiet(self): pass\n", "test_import_is_quiet"),
    "Fixture": ("    @pytest.fixture\n    def facts(self): return None\n", "facts"),
    "Marked": ("    pytestmark = pytest.mark.xfail\n", ""),
    "UnknownExcuse": ("    expected_failures = {'no_such': xfail('#1', until='9')}\n", "names no test"),
}


def test_a_softened_suite_fails(tmp_path: Path) -> None:
    head = "class Test{}(QuantizationConformance):\n    plugin = 'quantization/strict'\n"
    body = "".join(head.format(name) + lines for name, (lines, _) in SOFTENED.items())
    outcomes(tmp_path, body, "-k", "suite_is_whole", "-rfx")
    rows = {row["suite"]: row for row in json.loads((tmp_path / "report.json").read_text())["tests"]}
    assert rows.keys() == {f"Test{name}" for name in SOFTENED}
    # An xfail mark of pytest's turns the failure of the meta-test itself into an excuse, which is no pass either.
    assert rows.pop("TestMarked")["outcome"] in ("failed", "xfailed")
    for suite, row in rows.items():
        assert row["outcome"] == "failed" and SOFTENED[suite.removeprefix("Test")][1] in row["detail"], row


def test_excuses_hold_once_and_until_their_version(tmp_path: Path) -> None:
    body = """
class TestA(QuantizationConformance):
    plugin = "quantization/strict"
    expected_failures = {
        "mine[a]": xfail("#1", until="2.0"), "mine[b]": xfail("#2", until="0.5"), "mine[c]": xfail("#3", until="2.0"),
    }
    @pytest.mark.parametrize("letter", "abcd")
    def test_mine(self, letter):
        assert letter == "c"
"""
    found, _ = outcomes(tmp_path, body, "-k", "mine")
    assert found == {
        "test_mine[a]": "xfailed",
        "test_mine[b]": "failed",
        "test_mine[c]": "failed",
        "test_mine[d]": "failed",
    }


def test_a_crash_costs_one_test_and_the_others_still_run(tmp_path: Path) -> None:
    body = """
class TestA(QuantizationConformance):
    plugin = "quantization/strict"
    @dangerous
    @pytest.mark.parametrize("letter", "abc")
    def test_mine(self, letter):
        if letter == "b":
            os.kill(os.getpid(), signal.SIGSEGV)
        if letter == "c":
            unclaimed("not said")
"""
    found, output = outcomes(tmp_path, body, "-k", "mine")
    assert found == {"test_mine[a]": "passed", "test_mine[b]": "crashed", "test_mine[c]": "unclaimed"}
    assert "signal 11" in output


def test_a_failure_comes_with_a_script_that_runs_it_alone(tmp_path: Path) -> None:
    body = """
class TestA(QuantizationConformance):
    plugin = "quantization/strict"
    expected_failures = {"import_is_quiet": xfail("#1", until="2.0")}
"""
    _, output = outcomes(tmp_path, body, "-k", "import_is_quiet", "--rabbet-seed=7")
    script = output[output.index('"""Runs one case') :]
    script = script[: script.index("--rabbet-seed=7") + len('--rabbet-seed=7"]))')]
    (tmp_path / "alone.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "alone.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
