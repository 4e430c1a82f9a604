"""Results of a suite: expected failures, the stand-alone script of a failure, rows for reports and certificates."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from rabbet_sdk.conformance.base import suite_of
from rabbet_sdk.conformance.outcome import ExpectedFailure
from rabbet_sdk.conformance.subject import find_entry

__all__ = ["OUTCOMES", "judge_expected", "row", "script"]

OUTCOMES = ("passed", "failed", "crashed", "timeout", "xfailed", "unclaimed", "unavailable", "pending")
"""Every outcome; only the first is a pass."""


def judge_expected(item: pytest.Item, suite: Any, report: Any) -> None:
    """Apply ``expected_failures`` to the report of a call."""
    name = item.name.removeprefix("test_")
    expected: ExpectedFailure | None = suite.expected_failures.get(name)
    if expected is None:
        expected = suite.expected_failures.get(name.partition("[")[0])
    if expected is None or report.skipped:
        return
    version = Version(find_entry(suite.plugin).version)
    if version >= Version(expected.until):
        report.outcome = "failed"
        report.longrepr = f"the excuse {expected.reason} ran out: version {version} is not below {expected.until}"
    elif report.failed:
        report.outcome = "skipped"
        report.wasxfail = expected.reason
    else:
        report.outcome = "failed"
        report.longrepr = f"passes, though {expected.reason} says that it fails; remove it from expected_failures"


def script(suite: Any, test: str, seed: int) -> str:
    """A file that runs one case alone."""
    kind = suite_of(suite)
    return f'''"""Runs one case of {kind.__name__} alone: python FILE"""

import pytest
from {kind.__module__} import {kind.__name__}


class TestCase({kind.__name__}):
    plugin = {suite.plugin!r}
    device = {suite.device!r}
    options = {dict(suite.options)!r}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__ + {"::TestCase::" + test!r}, "--rabbet-seed={seed}"]))
'''


def row(report: pytest.TestReport) -> dict[str, Any]:
    """One result as plain data."""
    outcome = getattr(report, "rabbet_outcome", None) or ("xfailed" if hasattr(report, "wasxfail") else report.outcome)
    parts = report.nodeid.split("::")
    errors = [value for key, value in report.user_properties if key == "rabbet_error"]
    return {
        "suite": parts[-2] if len(parts) > 2 else "",
        "test": parts[-1],
        "outcome": outcome,
        "detail": "" if report.passed else _reason(report),
        "errors": errors,
    }


def _reason(report: pytest.TestReport) -> str:
    """One line that says why it is no pass."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longreprtext).strip().splitlines()
    return lines[0] if lines else ""
