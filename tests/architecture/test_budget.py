"""Sizes stay within the budget: core, its contract side, each plugin, files, functions, parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from source import (
    BUDGET,
    CORE,
    ROOT,
    all_files,
    code_lines,
    core_files,
    functions,
    lib_roots,
    plugin_files,
    plugin_roots,
    sdk_files,
)

KERNELS = {ROOT / path for path in BUDGET["kernels"]}
FILES = [path for path in all_files() if path not in KERNELS]


def total(paths: list[Path]) -> int:
    return sum(len(code_lines(path)) for path in paths)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_core_stays_within_its_ceiling() -> None:
    assert total(core_files()) <= BUDGET["core"]


def test_contracts_types_registry_and_config_stay_small() -> None:
    folders = ("contracts", "types", "registry", "config")
    assert (
        total([path for path in core_files() if path.relative_to(CORE).parts[0] in folders]) <= BUDGET["contract_side"]
    )


def test_sdk_stays_within_its_ceiling() -> None:
    assert total(sdk_files()) <= BUDGET["sdk"]


@pytest.mark.parametrize("root", [*lib_roots(), *plugin_roots()], ids=lambda root: root.name)
def test_plugin_stays_within_its_ceiling(root: Path) -> None:
    assert total([path for path in plugin_files(root) if path not in KERNELS]) <= BUDGET["plugin"]


def test_no_file_is_too_long() -> None:
    long = {relative(path): len(code_lines(path)) for path in FILES if len(code_lines(path)) > BUDGET["file"]}
    assert not long


def test_no_function_is_too_long() -> None:
    long = {}
    for path in FILES:
        lines = code_lines(path)
        for node in functions(path):
            size = sum(1 for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in lines)
            if size > BUDGET["function"]:
                long[f"{relative(path)}:{node.name}"] = size
    assert not long


def test_no_function_has_too_many_positional_parameters() -> None:
    wide = {}
    for path in FILES:
        for node in functions(path):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
            if len(names) > BUDGET["parameters"]:
                wide[f"{relative(path)}:{node.name}"] = len(names)
    assert not wide
