"""Throw-away distributions, as in the registry's tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "pains_registry_conftest", Path(__file__).parents[2] / "core/tests/registry/conftest.py"
)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
site, fake_dist, forget_staged = _module.site, _module.fake_dist, _module.forget_staged
