"""Build contexts of one rank or several, and a quantisation method that stores eight values an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rabbet_sdk.fakes.ranks import SilentRanks, build_context

from rabbet.layers import BuildContext


def make_context(rank: int = 0, size: int = 1, **changes: Any) -> BuildContext:
    return build_context(SilentRanks(rank, size), **changes)


@pytest.fixture
def context() -> Callable[..., BuildContext]:
    return make_context
