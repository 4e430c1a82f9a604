"""The same engines as in the tests of the engine, and tokenizers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rabbet.front.tokenizer import Tokenizer, load_tokenizer

TESTS = Path(__file__).parents[1]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"front_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_engine = _load(TESTS / "engine/conftest.py")
null, model_dir, options = _engine.null, _engine.model_dir, _engine.options


@pytest.fixture(scope="session")
def byte_level(model_dir: Path) -> Tokenizer:
    """A token a byte, and some that cut characters."""
    return load_tokenizer(model_dir)


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Pieces, and byte tokens for all else."""
    directory = tmp_path_factory.mktemp("fallback")
    _load(TESTS / "front/byte_tokenizer.py").write_byte_fallback(directory)
    return load_tokenizer(directory)
