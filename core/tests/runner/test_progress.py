"""The bar of loading: what it shows on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rabbet.contracts.weights import TensorInfo
from rabbet.runner.progress import loading_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def resolved(*infos: TensorInfo) -> Any:
    weights = SimpleNamespace(infos=lambda files: infos)
    return SimpleNamespace(composition=SimpleNamespace(load=lambda kind: weights), files=None)


def info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name=name, shape=shape, dtype="float32", file=Path("x"))


def test_terminal_sees_share_bytes_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", terminal)
    with loading_progress(resolved(info("a", 30, 10), info("b", 100)), is_shown=True) as progress:
        assert progress is not None
        progress("a", 1_200_000)
    shown = terminal.getvalue()
    assert "loading weights" in shown and "75%" in shown and "1.2 MB" in shown and " a" in shown


@pytest.mark.parametrize(("is_shown", "stream"), [(False, Terminal()), (True, io.StringIO())])
def test_elsewhere_nothing_is_shown(is_shown: bool, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with loading_progress(resolved(), is_shown=is_shown) as progress:
        assert progress is None
    assert stream.getvalue() == ""
