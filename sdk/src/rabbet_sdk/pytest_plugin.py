"""pytest's side of the suites: outcomes of their own, expected failures, child processes, stand-alone scripts, a report.
And the fixtures of the fakes.

Loaded by pytest through its entry point wherever the SDK is installed; touches only classes of the suites.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from rabbet_sdk.fixtures import fake_dist, faulty_store, null_platform, scripted_proposer, tiny_engine

__all__ = ["SEED", "fake_dist", "faulty_store", "null_platform", "scripted_proposer", "tiny_engine"]

SEED = 20260101
_CHILDREN = pytest.StashKey[Any]()
_FAILED = pytest.StashKey[set[Any]]()
_LETTERS = {"unclaimed": "u", "unavailable": "n", "pending": "p", "crashed": "C", "timeout": "T"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suites."""
    group = parser.getgroup("rabbet", "conformance of Rabbet plugins")
    group.addoption(
        "--rabbet-seed", dest="rabbet_seed", type=int, default=SEED, metavar="N", help="seed of random inputs"
    )
    group.addoption(
        "--rabbet-level", dest="rabbet_level", type=int, default=5, metavar="N", help="highest level, 1 to 5"
    )
    group.addoption("--rabbet-report", dest="rabbet_report", metavar="FILE", help="write results as JSON")
    group.addoption(
        "--rabbet-one-child", dest="rabbet_one_child", action="store_true",
        help="run the dangerous tests of all classes in one child process, not in one a class",
    )  # fmt: skip
    group.addoption(
        "--rabbet-first-failure", dest="rabbet_first_failure", action="store_true",
        help="leave out the rest of a class once one of its tests has failed",
    )  # fmt: skip
    group.addoption("--rabbet-child", dest="rabbet_child", metavar="FILE", help="internal: results of a child process")


def pytest_configure(config: pytest.Config) -> None:
    """Collect results only where somebody asked for them."""
    if config.getoption("rabbet_report"):
        config.pluginmanager.register(_Collector(config), "rabbet-report")


def pytest_report_header(config: pytest.Config) -> str | None:
    """The seed, so that a run can be repeated."""
    return f"rabbet: seed {config.getoption('rabbet_seed')}"


def _suite(item: pytest.Item) -> Any:
    """The item's class if it is a conformance class."""
    cls = getattr(item, "cls", None)
    return cls if cls is not None and hasattr(cls, "expected_failures") and hasattr(cls, "knobs") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what lies above the wanted level."""
    highest = config.getoption("rabbet_level")
    above = [i for i in items if _suite(i) and getattr(getattr(i, "obj", None), "__rabbet_level__", 1) > highest]
    if above:
        config.hook.pytest_deselected(items=above)
        items[:] = [item for item in items if item not in above]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run dangerous tests in a child process; their reports come back as they are."""
    if _suite(item) is None or not getattr(getattr(item, "obj", None), "__rabbet_dangerous__", False):
        return None
    if item.config.getoption("rabbet_child"):
        return None
    from rabbet_sdk.conformance.child import Children

    children = item.config.stash.setdefault(_CHILDREN, Children(item.config))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in children.reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The class's fixtures would otherwise wait for an item that never ran here.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where the first failure is enough, nothing follows it."""
    if item.config.getoption("rabbet_first_failure") and _suite(item) in item.config.stash.get(_FAILED, ()):
        pytest.skip("a test of this class has failed")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tell the parent which test runs, before it can crash."""
    if _child_file is not None:
        _append({"start": nodeid})


_child_file: Path | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Know the child's result file."""
    global _child_file
    name = session.config.getoption("rabbet_child")
    _child_file = Path(name) if name else None


def _append(row: dict[str, Any]) -> None:
    assert _child_file is not None
    with _child_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Sort outcomes, apply expected failures, add a script to failures."""
    outcome = yield
    suite = _suite(item)
    if suite is None:
        return
    from rabbet_sdk.conformance.outcome import Unavailable, Unclaimed
    from rabbet_sdk.conformance.report import judge_expected, script

    report = outcome.get_result()
    raised = call.excinfo.value if call.excinfo is not None else None
    if isinstance(raised, Unclaimed | Unavailable):
        report.rabbet_outcome = type(raised).__name__.lower()
    if report.when == "call":
        judge_expected(item, suite, report)
        if report.failed and getattr(item.obj, "__rabbet_pending__", None):  # type: ignore[attr-defined]
            report.outcome, report.rabbet_outcome = "skipped", "pending"
            report.longrepr = (str(item.path), 0, f"pending: {raised}")
    if report.failed:
        item.config.stash.setdefault(_FAILED, set()).add(suite)
        seed = item.config.getoption("rabbet_seed")
        report.sections.append(("stand-alone script", script(suite, item.name, seed)))


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Letters and words of the outcomes that are no passes."""
    name = getattr(report, "rabbet_outcome", None)
    if name not in _LETTERS:
        return None
    # A crash is a failure like any other in the summary; the rest are neither passes nor failures.
    return ("failed" if report.failed else name, _LETTERS[name], name.upper())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a child: hand the report to the parent."""
    if _child_file is not None:
        _append({"report": _serialised(report)})


def _serialised(report: pytest.TestReport) -> dict[str, Any]:
    data: dict[str, Any] = report._to_json()
    return json.loads(json.dumps(data, default=str))  # type: ignore[no-any-return]


class _Collector:
    """Keeps what ``--rabbet-report`` writes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One row a test: of its call, or of the phase that ended it."""
        if report.when == "call" or not report.passed:
            from rabbet_sdk.conformance.report import row

            self.rows.append(row(report))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file."""
        target = self.config.getoption("rabbet_report")
        text = json.dumps({"seed": self.config.getoption("rabbet_seed"), "tests": self.rows}, indent=1)
        Path(target).write_text(text, encoding="utf-8")
