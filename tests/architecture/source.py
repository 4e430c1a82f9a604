"""Finds and parses the project's sources; shared by the architecture tests."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "rabbet"
BUDGET = tomllib.loads((Path(__file__).parent / "budget.toml").read_text())
_FREE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def core_files() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def plugin_roots() -> list[Path]:
    return sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))


def lib_roots() -> list[Path]:
    """What several plugins share: distributions that are no plugins."""
    return sorted(path.parent for path in (ROOT / "libs").glob("*/pyproject.toml"))


def plugin_files(root: Path) -> list[Path]:
    return sorted((root / "src").rglob("*.py"))


def sdk_files() -> list[Path]:
    return sorted((ROOT / "sdk" / "src").rglob("*.py"))


def all_files() -> list[Path]:
    return core_files() + sdk_files() + [path for root in lib_roots() + plugin_roots() for path in plugin_files(root)]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Numbers of the lines that carry a token, docstrings left out."""
    docstrings: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                if isinstance(body[0].value.value, str):
                    docstrings.update(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in _FREE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return frozenset(lines - docstrings)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Each imported module, its line, and whether the import is for typing only."""
    typing_only: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in node.body:
                typing_only.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node.lineno in typing_only
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "rabbet":
                for alias in node.names:
                    yield f"rabbet.{alias.name}", node.lineno, node.lineno in typing_only
            else:
                yield node.module, node.lineno, node.lineno in typing_only
