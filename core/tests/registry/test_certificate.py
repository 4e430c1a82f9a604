"""Certificates: what they say, and when they say nothing about what is installed."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from rabbet.contracts import KINDS
from rabbet.errors import PluginRefusedError
from rabbet.registry.catalog import Catalog
from rabbet.registry.certificate import (
    manifest_digest,
    proof_of,
    read_certificates,
    wheel_digest,
    wheel_digest_of,
)
from rabbet.registry.describe import list_plugins, plugin_info
from rabbet.registry.entry import Entry
from rabbet.registry.policy import PluginPolicy
from rabbet.registry.select import select

Write = Callable[..., str]
ATTENTION = KINDS["attention"].version
COUNTS = {
    "passed": 812,
    "failed": 0,
    "crashed": 0,
    "timeout": 0,
    "xfailed": 1,
    "unclaimed": 41,
    "unavailable": 3,
}


@pytest.fixture
def installed(site: Path, fake_dist: Write) -> tuple[Path, Entry]:
    """A distribution with a RECORD, as an installer leaves it."""
    package = fake_dist()
    info = site / "acme-1.0.dist-info"
    rows = []
    for file in sorted((site / package).iterdir()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        rows.append(f"{package}/{file.name},sha256={digest},1")
    rows += [f"{info.name}/INSTALLER,,", f"{package}/__pycache__/x.pyc,,", "../../bin/acme,sha256=abc,1"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    entry = next(e for e in Catalog.scan(path=[str(site)]).entries if e.distribution == "acme")
    return site / package, entry


def certificate(entry: Entry, **changes: Any) -> dict[str, Any]:
    assert entry.entry_point is not None and entry.entry_point.dist is not None
    return {
        "schema": 1,
        "kind": "attention",
        "name": "acme_flash",
        "distribution": "Acme",
        "version": "1.0",
        "wheel_digest": wheel_digest(entry.entry_point.dist),
        "contract": ATTENTION,
        "arch": "avx512",
        "counts": COUNTS,
    } | changes


def put(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def test_without_a_certificate_nothing_is_proved(installed: tuple[Path, Entry], tmp_path: Path) -> None:
    proof = proof_of(installed[1], directory=tmp_path)
    assert (proof.state, proof.badge) == ("none", "")


@pytest.mark.parametrize("place", ["package", "directory"])
def test_badge_counts_and_never_a_percentage(installed: tuple[Path, Entry], tmp_path: Path, place: str) -> None:
    folder, entry = installed
    put(folder / "certificate.json" if place == "package" else tmp_path / "attention-acme_flash.json", certificate(entry))
    proof = proof_of(entry, arch="avx512", directory=tmp_path)
    assert proof.state == "certified", proof.reason
    assert proof.badge == f"attention {ATTENTION} · avx512 · 812 pass, 0 fail, 41 unclaimed"
    assert proof_of(entry, arch="sm_90", directory=tmp_path).state == "none"


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({"wheel_digest": "0" * 64}, "stale", "another wheel"),
        ({"contract": "0.9"}, "stale", "contract 0.9"),
        ({"counts": COUNTS | {"crashed": 2}}, "failed", "2 fail"),
        ({"counts": COUNTS | {"passed": 0}}, "failed", "0 pass"),
        ({"counts": COUNTS | {"passed": "812"}}, "unverifiable", "counts.passed"),
        ({"counts": {}}, "unverifiable", "counts.passed"),
        ({"schema": 2}, "unverifiable", "schema 1"),
        ({"version": 3}, "unverifiable", "'version'"),
        ({"arch": ["avx512"]}, "unverifiable", "'arch'"),
        ({"distribution": "other"}, "unverifiable", "of other"),
        ({"name": "other"}, "unverifiable", "attention/other"),
    ],
)
def test_what_does_not_hold_is_said(
    installed: tuple[Path, Entry], tmp_path: Path, changes: dict[str, Any], state: str, reason: str
) -> None:
    entry = installed[1]
    put(tmp_path / "attention-acme_flash.json", certificate(entry, **changes))
    proof = proof_of(entry, directory=tmp_path)
    assert proof.state == state
    assert reason in proof.reason
    assert proof.badge.startswith(state)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "null"])
def test_damaged_file_is_unverifiable(installed: tuple[Path, Entry], tmp_path: Path, text: str) -> None:
    (tmp_path / "attention-acme_flash.json").write_text(text)
    assert proof_of(installed[1], directory=tmp_path).state == "unverifiable"


def test_list_holds_one_for_each_architecture(installed: tuple[Path, Entry], tmp_path: Path) -> None:
    folder, entry = installed
    rows = [certificate(entry), certificate(entry, arch="sm_90", counts=COUNTS | {"failed": 1}), certificate(entry, name="x")]
    put(folder / "certificate.json", rows)
    assert len(read_certificates(entry, tmp_path)) == 2
    assert proof_of(entry, arch="avx512", directory=tmp_path).state == "certified"
    assert proof_of(entry, arch="sm_90", directory=tmp_path).state == "failed"
    assert proof_of(entry, directory=tmp_path).state == "failed"


def test_editable_installation_cannot_be_verified(installed: tuple[Path, Entry], site: Path, tmp_path: Path) -> None:
    entry = installed[1]
    put(tmp_path / "attention-acme_flash.json", certificate(entry))
    (site / "acme-1.0.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    assert proof_of(entry, directory=tmp_path).state == "unverifiable"


def test_digest_is_that_of_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "acme_wheel").mkdir(parents=True)
    (source / "acme_wheel" / "__init__.py").write_text("def main():\n    pass\n")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "acme-wheel"\nversion = "1.0"\n[project.scripts]\nacme-wheel = "acme_wheel:main"\n'
        '[tool.setuptools]\npackages = ["acme_wheel"]\n'
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True, timeout=120
    )
    wheel = next(tmp_path.glob("*.whl"))
    target = tmp_path / "target"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=120)
    distribution = PathDistribution(next(target.glob("*.dist-info")))
    assert wheel_digest(distribution) == wheel_digest_of(wheel)
    assert manifest_digest(distribution) is None


def test_digest_of_what_is_no_wheel_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_text("x")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        archive.writestr("x.py", "")
    for name in ("a.whl", "b.whl", "c.whl"):
        with pytest.raises(ValueError, match=f"{name} is no wheel"):
            wheel_digest_of(tmp_path / name)


def test_manifest_digest_is_of_its_bytes(installed: tuple[Path, Entry]) -> None:
    folder, entry = installed
    assert entry.entry_point is not None and entry.entry_point.dist is not None
    expected = hashlib.sha256((folder / "rabbet.toml").read_bytes()).hexdigest()
    assert manifest_digest(entry.entry_point.dist) == expected


@dataclass(frozen=True)
class Query:
    arch: str = "avx512"
    device_type: str = "cpu"


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [({}, True), ({"arch": "sm_90"}, False), ({"contract": "0.9"}, False), ({"counts": COUNTS | {"timeout": 1}}, False)],
)
def test_auto_takes_an_outsider_that_is_certified_for_this_architecture(
    installed: tuple[Path, Entry], site: Path, tmp_path: Path, changes: dict[str, Any], is_taken: bool
) -> None:
    put(tmp_path / "attention-acme_flash.json", certificate(installed[1], **changes))
    catalog = Catalog.scan(PluginPolicy(certificates=str(tmp_path)), path=[str(site)])
    if is_taken:
        assert select(catalog, "attention", name=None, query=Query()).name == "acme_flash"
        return
    with pytest.raises(PluginRefusedError, match="certified ones, and .*--plugins-auto any"):
        select(catalog, "attention", name=None, query=Query())


def test_rows_show_the_badge(installed: tuple[Path, Entry], site: Path, tmp_path: Path) -> None:
    put(tmp_path / "attention-acme_flash.json", certificate(installed[1], wheel_digest="0"))
    catalog = Catalog.scan(PluginPolicy(certificates=str(tmp_path)), path=[str(site)])
    (row,) = list_plugins(catalog, "attention")
    assert row["certificate"] == f"stale: attention {ATTENTION} · avx512 · 812 pass, 0 fail, 41 unclaimed"
    (info,) = plugin_info(catalog, "acme-flash")
    assert "another wheel" in info["certificate_reason"]
