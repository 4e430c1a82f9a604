"""Puts the strict twins on the path of every test of the SDK."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rabbet_sdk.strict import install_twins


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that holds the distribution of the twins."""
    return Path(_SITE)


_SITE = ""


def pytest_configure(config: pytest.Config) -> None:
    """Before collection: suites read claims while tests are collected."""
    import tempfile

    global _SITE
    if not _SITE:
        directory = tempfile.TemporaryDirectory()
        config.add_cleanup(directory.cleanup)
        _SITE = directory.name
        install_twins(Path(_SITE))
        sys.path.insert(0, _SITE)
        config.add_cleanup(lambda: sys.path.remove(_SITE) if _SITE in sys.path else None)


@pytest.fixture(autouse=True)
def _keep_path() -> Iterator[None]:
    """A test that changes ``sys.path`` does not disturb the others."""
    before = list(sys.path)
    yield
    sys.path[:] = before
