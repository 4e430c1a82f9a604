"""Hunts mutants: writes each as a distribution, runs the test that must catch it, and tells which ones live."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rabbet_sdk.conformance import suite_for
from rabbet_sdk.environment import child_environment
from rabbet_sdk.fakes.dist import write_distribution
from rabbet_sdk.mutants.base import Mutant, all_mutants
from rabbet_sdk.strict import install_twins, twin_table

__all__ = ["Kill", "hunt"]

_DEAD = ("failed", "crashed", "timeout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """What became of one mutant.

    Attributes:
        kind: Its kind.
        mutant: The mutant.
        killed: The test that had to catch it did.
        detail: The failure's last line, or why it lives.
    """

    kind: str
    mutant: Mutant
    killed: bool
    detail: str


def hunt(kinds: Iterable[str], directory: Path) -> list[Kill]:
    """Run the zoo of ``kinds``; each mutant only against the test named for it.

    Args:
        kinds: Kinds with mutants.
        directory: An empty directory for distributions and test files.
    """
    zoo = [(kind, mutant) for kind in kinds for mutant in all_mutants(kind)]
    site = directory / "site"
    site.mkdir()
    install_twins(site)
    file = directory / "test_zoo.py"
    suites = sorted({kind for kind, _ in zoo})
    lines = [f"from rabbet_sdk.conformance import {', '.join(suite_for(kind).__name__ for kind in suites)}\n"]
    wanted = []
    for number, (kind, mutant) in enumerate(zoo):
        _write(site, kind, mutant, number)
        lines.append(
            f"class TestZoo{number}({suite_for(kind).__name__}):\n    plugin = {f'{kind}/{mutant.name}'!r}\n"
            + "".join(f"    {line}\n" for line in mutant.knobs.splitlines())
        )
        wanted.append(f"{file}::TestZoo{number}::{mutant.caught_by}")
    file.write_text("\n\n".join(lines), encoding="utf-8")
    rows, output = _run(directory, site, wanted)
    return [_judge(kind, mutant, rows.get(f"TestZoo{n}", []), output) for n, (kind, mutant) in enumerate(zoo)]


def _write(site: Path, kind: str, mutant: Mutant, number: int) -> None:
    distribution = f"zoo-{number}-{kind}".replace("_", "-")
    target = mutant.target or f"{distribution.replace('-', '_')}.plugin:Plugin"
    write_distribution(
        site,
        distribution,
        provides={f"{kind}/{mutant.name}": target},
        manifest=mutant.manifest if mutant.manifest is not None else _manifest(kind, mutant),
        modules=mutant.modules,
    )


def _manifest(kind: str, mutant: Mutant) -> str:
    table = twin_table(kind)
    roles = json.dumps(table.get("roles", ["worker"]))
    claims = mutant.claims
    if claims is None:
        claims = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.get("claims", {}).items())
    return (
        f'schema = 1\n\n[[provides]]\nkind = "{kind}"\nname = "{mutant.name}"\n'
        f'contract = "{table["contract"]}"\nroles = {roles}\npriority = 10\n'
        f"adds_routes = {json.dumps(table.get('adds_routes', False))}\n[provides.claims]\n{claims}\n"
    )


def _run(directory: Path, site: Path, wanted: list[str]) -> tuple[dict[str, list[dict[str, str]]], str]:
    report = directory / "report.json"
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", f"--rootdir={directory}",
        "-c", str(directory / "pytest.ini"), f"--rabbet-report={report}", "--rabbet-one-child", "--rabbet-first-failure", *wanted,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=directory,
        # Tensors are small, and hunts may run side by side: more threads would only get into each other's way.
        env=child_environment(site, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    rows: dict[str, list[dict[str, str]]] = {}
    if report.is_file():
        for row in json.loads(report.read_text(encoding="utf-8"))["tests"]:
            rows.setdefault(row["suite"], []).append(row)
    return rows, (done.stdout + done.stderr)[-2000:]


def _judge(kind: str, mutant: Mutant, rows: list[dict[str, str]], output: str) -> Kill:
    if not any(mutant.caught_by in (row["test"], row["test"].partition("[")[0]) for row in rows):
        return Kill(kind=kind, mutant=mutant, killed=False, detail=f"{mutant.caught_by} did not run: {output}")
    dead = [row for row in rows if row["outcome"] in _DEAD]
    if dead:
        return Kill(kind=kind, mutant=mutant, killed=True, detail=dead[0]["detail"])
    counts = ", ".join(f"{sum(r['outcome'] == o for r in rows)} {o}" for o in sorted({r["outcome"] for r in rows}))
    return Kill(kind=kind, mutant=mutant, killed=False, detail=f"lives: {mutant.caught_by}: {counts}")
