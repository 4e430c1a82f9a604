"""``rabbet-sdk check`` and ``certify`` on an installed wheel; what they write is what core reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rabbet_sdk.scaffold import names_for, new_plugin


def run(*words: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path of child processes, with a plugin that was installed from its wheel."""
    project, site = tmp_path / "project", tmp_path / "site"
    new_plugin(names_for("quantization", "acme", "acme-quant"), project)
    pip = ("pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(project), cwd=tmp_path)
    run(
        *pip,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(next(tmp_path.glob("*.whl"))),
        cwd=tmp_path,
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, sys.path)]))
    return site


def test_a_certificate_is_written_read_and_goes_stale(installed: Path, tmp_path: Path) -> None:
    proofs = tmp_path / "proofs"
    wheel = next(tmp_path.glob("*.whl"))
    out = run(
        "rabbet_sdk", "certify", "quantization/acme", "--wheel", str(wheel), "--output", str(proofs), cwd=tmp_path
    )
    assert " 0 fail" in out
    row = json.loads((proofs / "quantization-acme.json").read_text())
    assert row["counts"]["passed"] > 20 and row["counts"]["failed"] == 0 and row["contract"] == "1.0"
    assert "float32" in row["worst_error"] and 0 < row["worst_error"]["float32"] <= 1

    def state() -> str:
        listed = json.loads(run("rabbet", "plugins", "list", "--json", "--certificates", str(proofs), cwd=tmp_path))
        return str(next(item for item in listed["plugins"] if item["name"] == "acme")["certificate"])

    assert state().startswith("quantization 1.0")
    record = next(installed.glob("*.dist-info/RECORD"))
    record.write_text(record.read_text().replace("plugin.py,sha256=", "plugin.py,sha256=x"))
    assert state().startswith("stale")


def test_a_failing_plugin_is_told_and_gives_exit_code_1(installed: Path, tmp_path: Path) -> None:
    file = installed / "acme_quant" / "plugin.py"
    file.write_text(file.read_text().replace("(codes_OI.float() * scale", "(1.5 * codes_OI.float() * scale"))
    out = run("rabbet_sdk", "check", "quantization/acme", cwd=tmp_path, code=1)
    assert "failed: test_" in out and "against float64" in out
