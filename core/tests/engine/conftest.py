"""Engines on the null device, with a tokenizer of plain bytes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PLUGIN = Path(__file__).parent / "null_plugins.py"


@pytest.fixture(scope="session")
def null() -> ModuleType:
    """The null plugins, under the name that the registry gives a one-file plugin, so that both are one module."""
    from rabbet.registry.onefile import stage_file

    name = stage_file(PLUGIN)
    return sys.modules[name]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose tokenizer has a token a byte, an end token, and a chat template."""
    spec = importlib.util.spec_from_file_location(
        "byte_tokenizer", Path(__file__).parents[1] / "front/byte_tokenizer.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("model")
    module.write_byte_level(directory)
    return directory


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    """Keywords of ``LLM`` for the null device."""
    return {
        "device": "hollow",
        "load_format": "hollow",
        "attention_backend": "hollow",
        "linear_backend": "hollow",
        "distributed_executor_backend": "hollow",
        "max_model_len": 512,
        "plugin": [str(PLUGIN)],
    }
