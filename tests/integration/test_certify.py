"""The step of a release that certifies the bundled plugins: with the command that any author has, bound to the wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*words: str, site: Path | None = None, code: int = 0) -> str:
    environment = {**os.environ, **({"PYTHONPATH": str(site)} if site else {})}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_a_wheel_carries_its_certificate_and_an_edited_one_none_that_holds(wheel_environment, tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name in ("core", "catalog", "sdk", "weights_gguf"):
        shutil.copy(next(wheel_environment.wheels.glob(f"rabbet_{name}-*.whl")), wheels)
    out = run(str(ROOT / "scripts" / "certify.py"), str(wheels), "--only", "rabbet-weights-gguf")
    assert out.startswith("weights/gguf") and " passed" in out and " failed" not in out
    wheel = next(wheels.glob("rabbet_weights_gguf-*.whl"))
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index", "--target")
    run(*pip, str(site), str(wheel))

    def row() -> dict[str, str]:
        listed = json.loads(run("-m", "rabbet", "plugins", "list", "--json", site=site))["plugins"]
        return next(item for item in listed if item["name"] == "gguf")

    assert row()["certificate_state"] == "certified" and row()["certificate"].startswith("weights ")
    record = next(site.glob("rabbet_weights_gguf-*.dist-info/RECORD"))
    record.write_text(record.read_text().replace("/__init__.py,sha256=", "/__init__.py,sha256=x"))
    assert row()["certificate_state"] == "stale"
    run(str(ROOT / "scripts" / "certify.py"), str(wheels), "--only", "no-such-wheel", code=1)


def test_a_wheel_holds_the_certificates_of_each_device_that_it_was_certified_on(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("certify_script", ROOT / "scripts" / "certify.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    wheel = tmp_path / "acme-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme/__init__.py", "")
        archive.writestr("acme-1.dist-info/RECORD", "acme/__init__.py,sha256=x,0\n")
    for arch, passed in (("avx512", 1), ("sm_90", 2), ("avx512", 3)):
        script.embed(wheel, "acme", [{"kind": "linear", "name": "acme", "arch": arch, "passed": passed, "file": "/tmp/x"}])
    with zipfile.ZipFile(wheel) as archive:
        found = json.loads(archive.read("acme/certificate.json"))
        rows = [line.partition(",")[0] for line in archive.read("acme-1.dist-info/RECORD").decode().splitlines()]
    assert [(row["arch"], row["passed"]) for row in found] == [("sm_90", 2), ("avx512", 3)] and "file" not in found[0]
    assert sorted(rows) == ["acme/__init__.py", "acme/certificate.json"]
