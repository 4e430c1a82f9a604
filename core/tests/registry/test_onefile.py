"""One-file plugins whose import waits: it is told which file, where it waits and what to do, and the process goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rabbet.config.load import parse_configs
from rabbet.config.policy import policy_of
from rabbet.errors import PluginLoadError
from rabbet.registry import Catalog, PluginPolicy
from rabbet.registry.onefile import MODULE_PREFIX, stage_file

WAITING = """
import onefile_gate

def helper():
    onefile_gate.opened.wait()

helper()
onefile_gate.passed.set()
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What the file waits for; opened at the end, so that no thread is left."""
    module = ModuleType("onefile_gate")
    module.opened, module.passed = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onefile_gate", module)
    before = set(threading.enumerate())
    yield module
    module.opened.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_an_import_that_waits_for_ever_ends_with_the_file_the_line_and_the_option(
    tmp_path: Path, gate: ModuleType
) -> None:
    file = tmp_path / "waiting.py"
    file.write_text(WAITING)
    for _ in range(2):
        with pytest.raises(PluginLoadError) as caught:
            stage_file(file, limit_s=0.05)
        assert str(caught.value) == (
            f"--plugin {file} is not imported after 0.05 s, and waits in line 5; mend it, or raise --plugin-import-timeout"
        )
        assert not [name for name in sys.modules if name.startswith(f"{MODULE_PREFIX}waiting_")]
    gate.opened.set()
    assert gate.passed.wait(10)


def test_an_import_that_takes_its_time_is_waited_for(tmp_path: Path, gate: ModuleType) -> None:
    file = tmp_path / "slow.py"
    file.write_text(WAITING)
    timer = threading.Timer(0.05, gate.opened.set)
    timer.start()
    assert stage_file(file, limit_s=30) in sys.modules and gate.passed.is_set()
    timer.join()


@pytest.mark.parametrize("code", ["raise SystemExit('no licence')", "raise KeyboardInterrupt('no licence')", "no licence"])
def test_what_an_import_raises_is_told_as_before(tmp_path: Path, code: str) -> None:
    file = tmp_path / "raising.py"
    file.write_text(code)
    with pytest.raises(PluginLoadError, match=r"raising.py failed to import: \w+: ") as caught:
        stage_file(file)
    assert caught.value.__cause__ is not None


def test_the_limit_is_an_option(tmp_path: Path, gate: ModuleType) -> None:
    engine, _ = parse_configs(["m", "--plugin-import-timeout", "0.05", "--plugin", str(tmp_path / "waiting.py")])
    assert PluginPolicy().import_timeout_s == 300 and policy_of(engine).import_timeout_s == 0.05
    (tmp_path / "waiting.py").write_text(WAITING)
    with pytest.raises(PluginLoadError, match=r"not imported after 0\.05 s"):
        Catalog.scan(policy_of(engine))
