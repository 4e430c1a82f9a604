"""What ``rabbet-sdk new`` writes installs from a wheel, is listed, and passes its suite unedited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from rabbet_sdk.scaffold import Names, ScaffoldError, names_for, new_plugin
from rabbet_sdk.strict import twin_kinds


def run(*command: str, cwd: Path, site: Path | None = None) -> str:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path} if site else None
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Scaffolds:
    """One of each kind that is asked for, from its wheel: what is listed, and how each test of its suite ended."""

    names: dict[str, Names]
    listed: dict[str, dict[str, str]]
    outcomes: dict[str, Counter[str]]
    output: str


@pytest.fixture(scope="module")
def scaffolds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scaffolds:
    """Built, installed, listed and tested together: the steps are the same for all, and each begins with seconds of imports."""
    home = tmp_path_factory.mktemp("scaffolds")
    tested = [item for item in request.session.items if item.path == request.path and "kind" in getattr(item, "fixturenames", ())]
    kinds = [item.callspec.params["kind"] for item in tested]
    names = {kind: names_for(kind, "AcmeForCausalLM" if kind == "model" else f"acme_{kind}") for kind in kinds}
    # By their distributions, as `rabbet-sdk new` names them: a directory named like a kind could shadow a module (platform).
    projects = [home / names[kind].distribution for kind in kinds]
    for kind, project in zip(kinds, projects, strict=True):
        new_plugin(names[kind], project)
    pip, wheels, site = (sys.executable, "-m", "pip", "--disable-pip-version-check"), home / "wheels", home / "site"
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), *map(str, projects), cwd=home)
    built = [str(wheel) for wheel in wheels.glob("*.whl")]
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(site), *built, cwd=home)
    rows = json.loads(run(sys.executable, "-m", "rabbet", "plugins", "list", "--json", cwd=home, site=site))["plugins"]
    for project in projects:
        (project / "src").rename(project / "away")
    (home / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    report = home / "report.json"
    words = ("-q", "-p", "no:cacheprovider", f"--rabbet-report={report}", *(f"{project.name}/tests" for project in projects))
    output = run(sys.executable, "-m", "pytest", *words, cwd=home, site=site)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for row in json.loads(report.read_text())["tests"]:
        outcomes[row["suite"]][row["outcome"]] += 1
    return Scaffolds(names, {row["distribution"]: row for row in rows}, outcomes, output)


@pytest.mark.parametrize("kind", twin_kinds())
def test_a_new_plugin_builds_installs_is_listed_and_passes_unedited(kind: str, scaffolds: Scaffolds) -> None:
    names = scaffolds.names[kind]
    row = scaffolds.listed[names.distribution]
    assert (row["kind"], row["name"], row["state"]) == (kind, names.name, "compatible")
    counts = scaffolds.outcomes[f"Test{''.join(part.capitalize() for part in names.name.split('_'))}"]
    assert counts["passed"] > 5 and not {"failed", "crashed", "timeout", "xfailed"} & counts.keys(), counts


def test_an_unknown_kind_and_a_bad_name_say_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match="did you mean quantization"):
        names_for("quantisation", "x")
    with pytest.raises(ScaffoldError, match="NAME is '9x'"):
        names_for("quantization", "9x")
    (tmp_path / "file").touch()
    with pytest.raises(ScaffoldError, match="not an empty directory"):
        new_plugin(names_for("quantization", "x"), tmp_path)
