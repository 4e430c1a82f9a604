"""What ``rabbet-sdk new`` writes installs from a wheel, is listed, and passes its suite unedited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rabbet_sdk.scaffold import ScaffoldError, names_for, new_plugin
from rabbet_sdk.strict import twin_kinds


def run(*command: str, cwd: Path, site: Path | None = None) -> str:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path} if site else None
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("kind", twin_kinds())
def test_a_new_plugin_builds_installs_is_listed_and_passes_unedited(kind: str, tmp_path: Path) -> None:
    names = names_for(kind, "AcmeForCausalLM" if kind == "model" else "acme_first")
    project, site = tmp_path / "project", tmp_path / "site"
    new_plugin(names, project)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(project), cwd=tmp_path)
    wheel = next(tmp_path.glob("*.whl"))
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    listed = json.loads(run(sys.executable, "-m", "rabbet", "plugins", "list", "--json", cwd=tmp_path, site=site))
    row = next(row for row in listed["plugins"] if row["distribution"] == names.distribution)
    assert (row["kind"], row["name"], row["state"]) == (kind, names.name, "compatible")
    (project / "src").rename(project / "away")
    out = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=project, site=site)
    assert " passed" in out


def test_an_unknown_kind_and_a_bad_name_say_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match="did you mean quantization"):
        names_for("quantisation", "x")
    with pytest.raises(ScaffoldError, match="NAME is '9x'"):
        names_for("quantization", "9x")
    (tmp_path / "file").touch()
    with pytest.raises(ScaffoldError, match="not an empty directory"):
        new_plugin(names_for("quantization", "x"), tmp_path)
