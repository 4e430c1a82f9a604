"""A closed client keeps nothing of its engine alive."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet import LLM
from rabbet.errors import ConfigError


@pytest.fixture
def executors(null: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weak references to all executors made."""
    made: list[Any] = []
    original = null.NullExecutor.load

    def load(self: Any) -> Any:
        made.append(weakref.ref(self))
        return original(self)

    monkeypatch.setattr(null.NullExecutor, "load", load)
    return made


def test_close_lets_go_of_the_executor(executors: list[Any], model_dir: Path, options: dict[str, Any]) -> None:
    llm = LLM(str(model_dir), engine_process=False, **options)
    llm.generate([[1]], use_tqdm=False)
    assert executors[0]() is not None
    llm.close()
    gc.collect()
    assert executors[0]() is None


def test_a_failed_start_lets_go_of_the_executor(executors: list[Any], model_dir: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LLM(str(model_dir), engine_process=False, kv_cache_memory_bytes=64, **options)
    gc.collect()
    assert executors[0]() is None
