"""The lock file: what it holds, what counts as a difference, and that drift is refused before any import."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rabbet.cli.main import app
from rabbet.errors import PluginPolicyError
from rabbet.registry import Catalog, PluginPolicy
from rabbet.registry.certificate import wheel_digest
from rabbet.registry.composition import source_hash
from rabbet.registry.discover import discover
from rabbet.registry.lock import differences, locked_state, read_lock

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def no_cache() -> None:
    source_hash.cache_clear()


def write_record(site: Path, dist: str, package: str, *more: str) -> Path:
    """RECORD as an installer writes it."""
    info = next(site.glob(f"{dist}-*.dist-info"))
    rows = [f"{info.name}/RECORD,,", f"{package}/__pycache__/x.pyc,,", *more]
    for path in sorted((site / package).iterdir()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        rows.append(f"{package}/{path.name},sha256={digest},{path.stat().st_size}")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return info


def state(site: Path) -> dict[str, Any]:
    source_hash.cache_clear()
    return locked_state(discover([str(site)]).entries)


def test_the_digest_of_a_wheel_is_that_of_its_files_and_of_nothing_that_an_installer_adds(
    site: Path, fake_dist: Write
) -> None:
    package = fake_dist()
    info = write_record(site, "acme", package)
    first = wheel_digest(PathDistribution(info))
    assert first is not None and len(first) == 64
    write_record(site, "acme", package, f"{info.name}/INSTALLER,sha256=abc,4", f"{package}/certificate.json,sha256=x,2")
    assert wheel_digest(PathDistribution(info)) == first
    (site / package / "__init__.py").write_text("other = 1\n")
    write_record(site, "acme", package)
    assert wheel_digest(PathDistribution(info)) != first
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    assert wheel_digest(PathDistribution(info)) is None


def test_a_lock_holds_versions_hashes_contracts_and_no_difference_to_itself(site: Path, fake_dist: Write) -> None:
    package = fake_dist(prelude='raise SystemExit("imported")')
    write_record(site, "acme", package)
    fake_dist("loose", name="loose")
    here = state(site)
    acme, loose = here["distributions"]["acme"], here["distributions"]["loose"]
    assert acme["version"] == "1.0" and len(acme["wheel"]) == 64 and acme["sources"] == ""
    assert loose["wheel"] == "" and len(loose["sources"]) == 64
    part = acme["contributions"]["attention/acme_flash"]
    assert (part["value"], part["contract"]) == (f"{package}:Backend", ">=1.0,<2")
    assert differences(json.loads(json.dumps(here)), here) == []


@pytest.mark.parametrize("change", ["source", "wheel", "new", "gone", "manifest"])
def test_each_difference_is_named(site: Path, fake_dist: Write, change: str) -> None:
    package, loose = fake_dist(), fake_dist("loose", name="loose")
    info = write_record(site, "acme", package)
    before = state(site)
    if change == "source":
        (site / loose / "more.py").write_text("x = 1\n")
    elif change == "wheel":
        (info / "RECORD").write_text((info / "RECORD").read_text() + f"{package}/more.py,sha256=abc,1\n")
    elif change == "new":
        fake_dist("third", name="third")
    elif change == "gone":
        (info / "entry_points.txt").write_text("")
    else:
        path = site / package / "rabbet.toml"
        path.write_text(path.read_text().replace("priority = 40", "priority = 41"))
    rows = differences(before, state(site))
    expected = {
        "source": "loose sources", "wheel": "acme wheel", "new": "third", "gone": "acme",
        "manifest": "acme contributions attention/acme_flash manifest",
    }  # fmt: skip
    assert [row["place"] for row in rows] == [expected[change]]
    assert (rows[0]["locked"] == "") is (change == "new") and (rows[0]["here"] == "") is (change == "gone")


def test_drift_is_refused_in_one_table_before_anything_is_imported(
    site: Path, fake_dist: Write, tmp_path: Path
) -> None:
    fake_dist()
    lock, one = tmp_path / "rabbet.lock", tmp_path / "one.py"
    one.write_text('raise SystemExit("imported")\n')
    lock.write_text(json.dumps(state(site)))
    policy = PluginPolicy(locked=str(lock))
    assert Catalog.scan(policy, path=[str(site)]).names("attention") == ("acme_flash",)
    fake_dist("other", name="other", prelude='raise SystemExit("imported")')
    with pytest.raises(
        PluginPolicyError, match=r"(?s)--plugins-locked.*one\.py: locked none.*rabbet plugins lock"
    ) as caught:
        Catalog.scan(PluginPolicy(locked=str(lock), files=(str(one),)), path=[str(site)])
    assert "other: locked none, here 1.0" in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema": 9}'])
def test_a_lock_file_that_is_none_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "rabbet.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PluginPolicyError, match="rabbet.lock.*rabbet plugins lock"):
        read_lock(path)


def test_commands_write_compare_and_end_with_a_status(site: Path, fake_dist: Write, tmp_path: Path) -> None:
    package, path, run = fake_dist(), tmp_path / "my.lock", CliRunner()
    assert "distributions" in run.invoke(app, ["plugins", "lock", str(path)]).output
    assert "acme" in read_lock(path)["distributions"]
    same = run.invoke(app, ["plugins", "verify", str(path)])
    assert same.exit_code == 0 and "no difference" in same.output
    (site / package / "more.py").write_text("x = 1\n")
    source_hash.cache_clear()
    drift = run.invoke(app, ["plugins", "verify", str(path)])
    assert drift.exit_code == 1 and "acme sources" in drift.output
    rows = json.loads(run.invoke(app, ["plugins", "verify", str(path), "--json"]).output)
    assert [row["place"] for row in rows] == ["acme sources"]
    assert json.loads(run.invoke(app, ["plugins", "lock", str(path), "--json"]).output) == read_lock(path)
