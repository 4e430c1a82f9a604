#!/usr/bin/env python3
"""Certify the distributions of this repository: build wheels, install them, run `rabbet-sdk certify`, and put the
certificates into the wheels, where `rabbet plugins list` finds them. Run once on each device, on the same wheels.

python scripts/certify.py WHEELS [--device cpu] [--only DISTRIBUTION]...

WHEELS is a directory; without wheels in it, scripts/wheels.sh builds them there first. Only what claims the device, or
claims no device at all, is certified. Status 1 if a suite fails.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rabbet_sdk.conformance import SUITES

from rabbet.registry.catalog import Catalog
from rabbet.registry.certificate import CERTIFICATE
from rabbet.registry.entry import Entry
from rabbet.registry.policy import canonical_distribution

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Certify everything that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", default=[], metavar="DISTRIBUTION")
    options = parser.parse_args()
    wheels = options.wheels.resolve()
    if not list(wheels.glob("*.whl")):
        subprocess.run(
            ["bash", str(ROOT / "scripts" / "wheels.sh"), str(wheels)], check=True, stdout=subprocess.DEVNULL
        )
    built = {canonical_distribution(path.name.partition("-")[0]): path for path in sorted(wheels.glob("*.whl"))}
    if unknown := sorted({canonical_distribution(name) for name in options.only} - built.keys()):
        raise SystemExit(f"--only {', '.join(unknown)}: there is no such wheel; there are: {', '.join(built)}")
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory) / "site"
        install(built.values(), site)
        is_failed = False
        for name, wheel in built.items():
            if not options.only or name in map(canonical_distribution, options.only):
                entries = list(provable(site, name, options.device))
                proofs = [certify(entry, wheel, site, Path(directory), options.device) for entry in entries]
                if proofs:
                    embed(wheel, entries[0].value.partition(":")[0].partition(".")[0], proofs)
                is_failed |= any(proof["counts"]["failed"] or not proof["counts"]["passed"] for proof in proofs)
    return int(is_failed)


def install(wheels: Sequence[Path] | Any, site: Path) -> None:
    """Install wheels into a directory, without what they depend on."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), *map(str, wheels)], check=True)


def provable(site: Path, distribution: str, device: str) -> Iterator[Entry]:
    """What a distribution provides, has a suite, and may run on the device."""
    for entry in Catalog.scan(path=[str(site)]).entries:
        claimed = entry.provided.claims.get("device", ()) if entry.provided else ()
        is_here = entry.kind != "platform" or entry.name == device
        if canonical_distribution(entry.distribution) == distribution and entry.kind in SUITES:
            if is_here and (not claimed or device in claimed):
                yield entry


def certify(entry: Entry, wheel: Path, site: Path, work: Path, device: str) -> dict[str, Any]:
    """Run the command that any author runs; returns the certificate."""
    plugin = f"{entry.kind}/{entry.name}"
    words = [sys.executable, "-m", "rabbet_sdk", "certify", plugin, "--device", device, "--wheel", str(wheel), "--json"]
    words += ["--output", str(work / "certificates")]
    if (tests := knobs(plugin)) is not None:
        words += ["--tests", str(tests)]
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, env=environment, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{plugin}: {done.stderr.strip() or done.stdout.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items() if count)
    print(f"{plugin} {found['contract']} of {wheel.name}: {counts}", flush=True)
    return found


def knobs(plugin: str) -> Path | None:
    """The test file in this repository that has a suite for the plugin."""
    folders = (ROOT / "core" / "tests" / "conformance", *sorted((ROOT / "plugins").glob("*/tests")))
    files = [file for folder in folders for file in sorted(folder.glob("test_*.py"))]
    return next((file for file in files if f'plugin = "{plugin}"\n' in file.read_text(encoding="utf-8")), None)


def embed(wheel: Path, package: str, proofs: Sequence[dict[str, Any]]) -> None:
    """Write the certificates into the wheel's package, beside those that it holds of other devices.

    Its digest leaves them out, so they stay valid.
    """
    name = f"{package}/{CERTIFICATE}"
    with zipfile.ZipFile(wheel) as old:
        known: list[dict[str, Any]] = json.loads(old.read(name)) if name in old.namelist() else []
    new_ones = [{key: value for key, value in proof.items() if key != "file"} for proof in proofs]
    replaced = {tuple(proof[key] for key in ("kind", "name", "arch")) for proof in new_ones}
    kept = [proof for proof in known if tuple(proof[key] for key in ("kind", "name", "arch")) not in replaced]
    data = (json.dumps([*kept, *new_ones], indent=1) + "\n").encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    target = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                rows = [row for row in content.decode().splitlines() if row.partition(",")[0] != name]
                content = "\n".join([f"{name},sha256={digest},{len(data)}", *rows, ""]).encode()
            if item.filename != name:
                new.writestr(item, content)
        new.writestr(name, data)
    shutil.move(target, wheel)


if __name__ == "__main__":
    sys.exit(main())
