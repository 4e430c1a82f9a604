"""``rabbet-sdk check``: the suite of a kind on an installed plugin, without a test file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.errors import PluginError
from rabbet_sdk.conformance import SUITES
from rabbet_sdk.conformance.report import OUTCOMES
from rabbet_sdk.conformance.subject import find_entry
from rabbet_sdk.environment import child_environment

__all__ = ["CheckResult", "check_plugin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What a suite found.

    Attributes:
        plugin: ``kind/name``.
        device: Where it ran.
        contract: Contract version.
        counts: Tests for each outcome.
        failures: Test and last line of each one that is no pass and is not excused.
        worst_error: dtype to the largest share of the error bound that was used.
        covered: Claimed cases that passed, as ``test[case]``.
        output: What pytest wrote.
    """

    plugin: str
    device: str
    contract: str
    counts: dict[str, int]
    failures: tuple[tuple[str, str], ...] = ()
    worst_error: dict[str, float] = field(default_factory=dict)
    covered: tuple[str, ...] = ()
    output: str = ""

    @property
    def is_passed(self) -> bool:
        """Something passed, nothing failed."""
        return self.counts["passed"] > 0 and not self.failures

    @property
    def badge(self) -> str:
        """One line: what was proved, never a percentage."""
        failed = self.counts["failed"] + self.counts["crashed"] + self.counts["timeout"]
        text = f"{self.plugin} {self.contract} · {self.device} · {self.counts['passed']} pass, {failed} fail"
        rest = [f"{self.counts[name]} {name}" for name in OUTCOMES[4:] if self.counts[name]]
        return ", ".join([text, *rest])


def check_plugin(
    plugin: str, *, device: str = "cpu", level: int = 5, seed: int | None = None, tests: Path | None = None
) -> CheckResult:
    """Run the suite in a process of its own.

    Args:
        plugin: ``kind/name``.
        device: Device that tests compute on.
        level: Highest level of tests.
        seed: Seed of random inputs.
        tests: A test file whose classes for this plugin say what the suite cannot know, a model's configuration say.

    Raises:
        rabbet.errors.PluginError: If the plugin is not installed, cannot be tested, or ``tests`` is no file.
    """
    entry = find_entry(plugin)
    if entry.kind not in SUITES:
        raise PluginError(
            f"there is no suite for the kind {entry.kind}; there are: {', '.join(SUITES)}", kind=entry.kind
        )
    if tests is not None and not tests.is_file():
        raise PluginError(f"--tests {tests}: there is no such file", kind=entry.kind)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        file = root / "test_check.py"
        file.write_text(_source(plugin, SUITES[entry.kind], device, tests), encoding="utf-8")
        report = root / "report.json"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={root}", "-c", str(root / "pytest.ini"),
            f"--rabbet-report={report}", f"--rabbet-level={level}", str(file),
        ]  # fmt: skip
        if seed is not None:
            command.append(f"--rabbet-seed={seed}")
        done = subprocess.run(
            command,
            cwd=root,
            env=child_environment(),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        rows = json.loads(report.read_text(encoding="utf-8"))["tests"] if report.is_file() else []
    return _result(plugin, device, entry.kind, rows, done.stdout + done.stderr)


def _source(plugin: str, suite: str, device: str, tests: Path | None) -> str:
    """A test file: one class, or a subclass on ``device`` of each that ``tests`` has for the plugin."""
    if tests is None:
        return (
            f"from rabbet_sdk.conformance import {suite}\n\n\nclass TestCheck({suite}):\n"
            f"    plugin = {plugin!r}\n    device = {device!r}\n"
        )
    path = tests.resolve()
    return (
        f"import sys\nfrom importlib import import_module\n\nfrom rabbet_sdk.conformance import {suite}\n\n"
        f"sys.path.insert(0, {str(path.parent)!r})\n"
        f"for name, cls in vars(import_module({path.stem!r})).items():\n"
        f"    if isinstance(cls, type) and issubclass(cls, {suite}) and cls.plugin == {plugin!r}:\n"
        f"        globals()[name] = type(name, (cls,), {{'device': {device!r}}})\ncls = None\n"
    )


def _result(plugin: str, device: str, kind: str, rows: list[dict[str, Any]], output: str) -> CheckResult:
    counted = Counter(row["outcome"] for row in rows)
    failures = tuple(
        (row["test"], str(row["detail"])) for row in rows if row["outcome"] in ("failed", "crashed", "timeout")
    )
    if not rows:
        failures = (("collection", (output.strip().splitlines() or ["pytest wrote nothing"])[-1]),)
    worst: dict[str, float] = {}
    for row in rows:
        for dtype, share in row["errors"]:
            worst[dtype] = max(worst.get(dtype, 0.0), float(share))
    return CheckResult(
        plugin=plugin,
        device=device,
        contract=KINDS[kind].version,
        counts={name: counted.get(name, 0) for name in OUTCOMES},
        failures=failures,
        worst_error=worst,
        covered=tuple(row["test"] for row in rows if row["outcome"] == "passed" and "[" in row["test"]),
        output=output,
    )
