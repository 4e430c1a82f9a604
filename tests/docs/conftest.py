"""Servers and the tiny model of the end-to-end tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parents[1] / "e2e/conftest.py"
_spec = importlib.util.spec_from_file_location("docs_e2e", _path)
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
sys.modules["docs_e2e"] = _e2e
_spec.loader.exec_module(_e2e)
serve, tiny_model = _e2e.serve, _e2e.tiny_model
