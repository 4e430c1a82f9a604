"""Where there is no GPU, the kernels run in Triton's interpreter, a thousand times slower: there fewer cases have to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Read when triton is imported, by the kernels' module.
_IS_INTERPRETED = not torch.cuda.is_available()
if _IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

_WHOLE = ("test_window_means_what_the_contract_says", "test_supports_is_honest")
_SLOW = ("longest", "decode_at_edges", "verify")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Interpreted: values of each setup by its chunks, everything else of the setup ``base``."""
    if not _IS_INTERPRETED:
        return
    suite = Path(__file__).parent / "test_conformance.py"
    dropped = [item for item in items if item.path == suite and _is_too_much(item)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]


def _is_too_much(item: pytest.Item) -> bool:
    test, _, case = item.name.partition("[")
    if not case or test.startswith(_WHOLE):
        return False
    if test == "test_values_are_those_of_the_definition":
        kept = ("-chunks]",) if case.startswith(("block_", "dtype_")) else ("-chunks]", "-decodes]")
        return not case.endswith(kept) and not case.startswith("base")
    return not case.startswith("base") or any(word in case for word in _SLOW)
