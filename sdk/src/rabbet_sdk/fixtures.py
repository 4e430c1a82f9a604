"""Fixtures that tests of plugins have wherever the SDK is installed."""

# Imports stand in the fixtures: tests that use none of them pay for none.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["fake_dist", "faulty_store", "null_platform", "scripted_proposer", "tiny_engine"]


@pytest.fixture
def fake_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``fake_dist(name, provides=...)`` writes a distribution on ``sys.path``; see ``fakes.dist.write_distribution``.

    What it registers and imports is forgotten with the test: an engine's process would look for its modules in vain.
    """
    import sys

    from rabbet.contracts.registration import _staged
    from rabbet_sdk.fakes.dist import write_distribution

    site = tmp_path / "fake-dists"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    packages: set[str] = set()

    def write(name: str, **options: Any) -> str:
        package = write_distribution(site, name, **options)
        packages.add(package)
        return package

    yield write
    for key in [key for key, record in _staged.items() if record.module.partition(".")[0] in packages]:
        del _staged[key]
    for module in [module for module in sys.modules if module.partition(".")[0] in packages]:
        del sys.modules[module]


@pytest.fixture
def tiny_engine(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``tiny_engine(script=..., attention_backend="acme", ...)`` starts a ``fakes.engine.TinyEngine`` and ends it."""
    from rabbet_sdk.fakes.engine import TinyEngine

    made: list[TinyEngine] = []

    def start(**options: Any) -> TinyEngine:
        made.append(TinyEngine(tmp_path / f"engine-{len(made)}", **options))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture
def null_platform() -> Iterator[Any]:
    """``fakes.platform.NullPlatform``, usable as ``--device null``; its numbers are put back afterwards."""
    from rabbet_sdk.fakes.platform import NullPlatform

    before = (NullPlatform.num_devices, NullPlatform.info, NullPlatform.refusals)
    yield NullPlatform
    NullPlatform.num_devices, NullPlatform.info, NullPlatform.refusals = before


@pytest.fixture
def faulty_store() -> Any:
    """An empty ``fakes.kv_store.FaultyStore``."""
    from rabbet_sdk.fakes.kv_store import FaultyStore

    return FaultyStore()


@pytest.fixture
def scripted_proposer() -> Callable[..., Any]:
    """``scripted_proposer({"r0": [5, 6]}, {"r0": 3})``: a ``fakes.proposers.ScriptedProposer``."""
    from rabbet_sdk.fakes.proposers import ScriptedProposer

    def make(
        script: Mapping[str, Sequence[int]], prompt_lengths: Mapping[str, int], context: Any = None
    ) -> ScriptedProposer:
        proposer = ScriptedProposer(context)
        proposer.script, proposer.prompt_lengths = script, prompt_lengths
        return proposer

    return make
