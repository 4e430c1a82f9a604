"""The ways of computing that every kernel test goes through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rabbet_hw_cpu import native

PATHS = ("tiles", "widest", "avx2", "generic", "torch")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Matrix tiles, each compiled variant, and plain torch; what this processor lacks is skipped."""
    name: str = request.param
    kernels = native.library()
    if name == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif kernels is None:
        pytest.skip("no compiler was there when the package was installed")
    if name == "tiles" and not native.has_amx():
        pytest.skip("this processor has no matrix tiles")
    if name != "tiles":
        monkeypatch.setattr(native, "has_amx", lambda: False)
    if kernels is not None and name in ("avx2", "generic"):
        level = {"generic": 0, "avx2": 1}[name]
        if kernels.rabbet_select(-1) <= level:
            pytest.skip(f"this processor has no {name}")
        kernels.rabbet_select(level)
    yield name
    if kernels is not None:
        kernels.rabbet_select(-1)
