"""A launch finds the compiled form of its arguments: the same facts, the same form; other facts, another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from rabbet_triton import launch
from rabbet_triton.launch import Kernel, dependence


class Function:
    """As a compiled kernel is called: by its grid, then with arguments; it counts what it compiled."""

    params = [
        SimpleNamespace(is_constexpr=False, do_not_specialize=False),
        SimpleNamespace(is_constexpr=False, do_not_specialize=False),
        SimpleNamespace(is_constexpr=False, do_not_specialize=True),
        SimpleNamespace(is_constexpr=True, do_not_specialize=False),
    ]

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Any:
            self.compiled.append(options)
            return {grid: lambda *again: self.launched.append(again)}

        return compile_and_launch


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    monkeypatch.setattr(launch, "IS_INTERPRETED", tl.constexpr(False))
    return Function()


def test_equal_facts_are_compiled_once(function: Function) -> None:
    kernel, x = Kernel(function), torch.zeros(64)
    for size, free in ((16, 3), (32, 1), (48, 4)):
        kernel((1, 1, 1), x, size, free, 0, num_warps=4)
    assert len(function.compiled) == 1 and function.launched == [(x, 32, 1, 0), (x, 48, 4, 0)]


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(64, dtype=torch.int32), 16, 3, 0),
        (torch.zeros(64)[1:], 16, 3, 0),
        (torch.zeros(64), 17, 3, 0),
        (torch.zeros(64), 1, 3, 0),
        (torch.zeros(64), 1 << 31, 3, 0),
        (torch.zeros(64), 16, 3, 1),
    ],
)
def test_other_facts_are_compiled_anew(other: tuple[Any, ...], function: Function) -> None:
    kernel = Kernel(function)
    kernel((1, 1, 1), torch.zeros(64), 16, 3, 0, num_warps=4)
    kernel((1, 1, 1), *other, num_warps=4)
    assert len(function.compiled) == 2


def test_dependent_launches_are_asked_for_where_the_last_argument_says_so(function: Function) -> None:
    kernel = Kernel(function)
    for dependent in (0, 1, 2):
        kernel((1, 1, 1), torch.zeros(64), 16, 3, dependent, num_warps=8, num_stages=2)
    assert [options.get("launch_pdl", False) for options in function.compiled] == [False, True, True]
    assert all(options["num_warps"] == 8 and options["num_stages"] == 2 for options in function.compiled)


def test_devices_that_cannot_launch_so_are_not_asked_to(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    for has, expected in ((False, (0, 0)), (True, (2, 1))):
        monkeypatch.setattr(launch, "_has_dependent", lambda device, has=has: has)
        assert (dependence(torch.zeros(1), is_small=True), dependence(torch.zeros(1), is_small=False)) == expected
