"""Every mutant is caught by the test named for it."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from rabbet_sdk.mutants import Kill, all_mutants, hunt, mutant_kinds


@pytest.fixture(scope="module")
def kills(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Kill]]:
    """The hunts of all kinds that are asked for: two side by side, as many processes as they take for one kind."""
    asked = [item.callspec.params["kind"] for item in request.session.items if item.path == request.path]
    kinds = sorted(asked, key=lambda kind: len(all_mutants(kind)))
    halves = [half for half in (kinds[::2], kinds[1::2]) if half]
    found: dict[str, list[Kill]] = defaultdict(list)
    with ThreadPoolExecutor(2) as pool:
        for hunted in pool.map(lambda half: hunt(half, tmp_path_factory.mktemp("zoo")), halves):
            for kill in hunted:
                found[kill.kind].append(kill)
    return found


@pytest.mark.parametrize("kind", mutant_kinds())
def test_every_mutant_is_caught(kind: str, kills: dict[str, list[Kill]]) -> None:
    killed = sum(kill.killed for kill in kills[kind])
    print(f"kill rate of {kind}: {killed} of {len(kills[kind])}")
    alive = [f"{kill.mutant.name}: {kill.detail}" for kill in kills[kind] if not kill.killed]
    assert not alive, "\n".join(alive)
    assert len(kills[kind]) == len(all_mutants(kind))
