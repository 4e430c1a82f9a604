"""``rabbet plugins``: plain lines and JSON, under the policy of flags and environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]

ONE_FILE = '''
"""A scheduler in one file."""
from rabbet.contracts.registration import register_scheduler
from rabbet.sched.scheduler import FcfsScheduler


@register_scheduler("upside_down")
class UpsideDown(FcfsScheduler):
    """The same under another name."""
'''


def test_list_has_a_row_for_each_contribution(rabbet: Run) -> None:
    status, out, _ = rabbet("plugins", "list")
    assert status == 0
    assert out.splitlines()[0].split()[:4] == ["kind", "name", "distribution", "version"]
    assert any(line.split()[:3] == ["scheduler", "fcfs", "rabbet-core"] for line in out.splitlines())


def test_list_as_json_of_one_kind(rabbet: Run) -> None:
    status, out, _ = rabbet("plugins", "list", "--kind", "scheduler", "--json")
    rows = json.loads(out)["plugins"]
    assert status == 0
    assert {"fcfs", "priority"} <= {row["name"] for row in rows} and {row["kind"] for row in rows} == {"scheduler"}


def test_the_policy_of_flags_and_environment_counts(rabbet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = rabbet("plugins", "list", "--kind", "scheduler", "--plugins-deny", "scheduler/priority")
    line = next(line for line in out.splitlines() if " priority " in line and "rabbet-core" in line)
    assert "denied by --plugins-deny scheduler/priority" in line
    monkeypatch.setenv("RABBET_PLUGINS_DENY", "scheduler/fcfs")
    _, out, _ = rabbet("plugins", "list", "--kind", "scheduler", "--json")
    states = {row["name"]: row["state"] for row in json.loads(out)["plugins"]}
    assert states["fcfs"] == "denied" and states["priority"] == "compatible"


def test_info_says_who_imports_it_and_how_it_is_chosen(rabbet: Run) -> None:
    status, out, _ = rabbet("plugins", "info", "scheduler/fcfs")
    assert status == 0
    assert "rabbet.sched.scheduler:FcfsScheduler" in out and "--scheduling-policy" in out
    rows = json.loads(rabbet("plugins", "info", "fcfs", "--json")[1])
    assert rows[0]["kind"] == "scheduler" and rows[0]["distribution"] == "rabbet-core"


def test_why_explains_a_choice(rabbet: Run) -> None:
    status, out, _ = rabbet("plugins", "why", "scheduler", "--name", "priority")
    assert status == 0 and "priority" in out and "rabbet-core" in out
    status, _, error = rabbet("plugins", "why", "schedulr")
    assert status == 2 and "did you mean scheduler" in error


def test_a_one_file_plugin_is_seen(rabbet: Run, tmp_path: Path) -> None:
    file = tmp_path / "upside.py"
    file.write_text(ONE_FILE)
    status, out, _ = rabbet("plugins", "list", "--kind", "scheduler", "--plugin", str(file))
    assert status == 0 and "upside_down" in out


def test_doctor_imports_one_plugin_in_a_process_of_its_own(rabbet: Run) -> None:
    status, out, _ = rabbet("plugins", "doctor", "fcfs")
    assert status == 0
    line = next(line for line in out.splitlines() if " fcfs " in line)
    assert " ok " in line and " ms, " in line
