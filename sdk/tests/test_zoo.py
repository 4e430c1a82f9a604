"""Every mutant is caught by the test named for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rabbet_sdk.mutants import hunt, mutant_kinds


@pytest.mark.parametrize("kind", mutant_kinds())
def test_every_mutant_is_caught(kind: str, tmp_path: Path) -> None:
    kills = hunt([kind], tmp_path)
    killed = sum(kill.killed for kill in kills)
    print(f"kill rate of {kind}: {killed} of {len(kills)}")
    alive = [f"{kill.mutant.name}: {kill.detail}" for kill in kills if not kill.killed]
    assert not alive, "\n".join(alive)
    assert kills
