"""Servers over a scripted engine."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Tests import what they need of it by this name.
scripted = _load("server_scripted", HERE / "scripted.py")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token a byte, and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    _load("server_byte_tokenizer", HERE.parent / "front/byte_tokenizer.py").write_byte_level(directory)
    return directory


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for a test."""
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture
def make_site(runner: asyncio.Runner, model_dir: Path) -> Callable[..., Any]:
    """Makes sites; keywords are options of the server."""
    return lambda **config: scripted.Site(runner, model_dir, **config)


@pytest.fixture
def site(make_site: Callable[..., Any]) -> Any:
    """One with the defaults."""
    return make_site()


@pytest.fixture
def fallback_site(runner: asyncio.Runner, tmp_path: Path) -> Any:
    """One whose tokenizer has pieces with their spaces, and bytes for all else."""
    _load("server_byte_tokenizer", HERE.parent / "front/byte_tokenizer.py").write_byte_fallback(tmp_path)
    return scripted.Site(runner, tmp_path)
