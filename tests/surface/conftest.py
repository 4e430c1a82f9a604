"""Servers over a scripted engine, engines on the null device, and the scheduler's fake runner, from core's own tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[2] / "core/tests"


def _load(name: str, path: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_server = _load("surface_server", TESTS / "server/conftest.py")
_engine = _load("surface_engine", TESTS / "engine/conftest.py")
runner, make_site, site = _server.runner, _server.make_site, _server.site
null, model_dir, options = _engine.null, _engine.model_dir, _engine.options


@pytest.fixture(scope="session")
def harness() -> ModuleType:
    """A scheduler over a small cache, driven by a runner that checks every plan."""
    return _load("surface_sched_harness", TESTS / "sched/sched_harness.py")
