"""What would be chosen on another machine, and distributions that lie on the path twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rabbet_sdk.fakes.platform import NullPlatform

from rabbet.contracts import Refusal, register_platform
from rabbet.registry.catalog import Catalog
from rabbet.registry.describe import doctor, explain, machine, shadowed

Write = Callable[..., str]
BROKEN = 'raise SystemExit("imported")'
CLAIMS = '[provides.claims]\ndevice = ["cuda"]\narch = ["{arch}"]\ndtype = ["bfloat16"]\nhead_dim = [64]\n'
CHILD = """
import sys
from rabbet.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
assert not [name for name in sys.modules if name.startswith("pkg_") or name == "torch"], "imported"
"""


def ask(site: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "plugins", "why", *words],
        # A bundled backend for GPUs would stand before an outsider's.
        env=os.environ | {"PYTHONPATH": str(site), "RABBET_PLUGINS_DENY": "rabbet-attention-triton"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def two(site: Path, fake_dist: Write) -> Path:
    fake_dist("old", name="for_80", priority=40, prelude=BROKEN, extra=CLAIMS.format(arch="sm_80"))
    fake_dist("new", name="for_90", priority=30, prelude=BROKEN, extra=CLAIMS.format(arch="sm_90"))
    return site


@pytest.mark.parametrize(("device", "chosen"), [("sm_80", "for_80"), ("sm_90", "for_90")])
def test_another_machine_is_answered_for_without_imports(two: Path, device: str, chosen: str) -> None:
    words = ("attention", "--plugins-auto", "any", "--device", device, "--dtype", "bfloat16", "--json")
    decision: dict[str, Any] = json.loads(ask(two, *words))
    assert decision["name"] == chosen and "manifests alone" in decision["asked_by"]
    if chosen == "for_90":
        row = next(row for row in decision["rejected"] if row["name"] == "for_80")
        assert row["state"] == "refused" and "sm_90 not in ['sm_80']" in row["reasons"][0]


def test_model_directory_gives_dtype_and_head_size(two: Path, tmp_path: Path) -> None:
    config = {"dtype": "bfloat16", "hidden_size": 256, "num_attention_heads": 2, "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("attention", "--plugins-auto", "any", "--arch", "sm_90", "--model", str(tmp_path))
    assert "HEAD_DIM: 128 not in [64]" in ask(two, *words)
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 64}))
    assert "->  for_90" in ask(two, *words)


def test_quantization_of_the_model_is_looked_up_by_name(two: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "nobodys"}}))
    assert "no quantization plugin named 'nobodys'" in ask(two, "quantization", "--device", "sm_90", "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("device", "arch", "expected"),
    [("sm_90", "", ("cuda", "sm_90")), ("", "sm_80", ("cuda", "sm_80")), ("cpu", "", ("cpu", None)), ("gfx942", "", ("cuda", "gfx942"))],
)
def test_device_may_be_an_architecture(device: str, arch: str, expected: tuple[str, str | None]) -> None:
    query = machine(device, arch, "")
    assert (query.device_type, query.arch) == expected


def test_distribution_on_the_path_twice_is_told(tmp_path: Path) -> None:
    for name, info in (("a", "acme-1.0.dist-info"), ("b", "acme-0.9.dist-info")):
        folder = tmp_path / name / info
        folder.mkdir(parents=True)
        version = info.removeprefix("acme-").removesuffix(".dist-info")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text("[rabbet.attention]\nx = acme:X\n")
    (line,) = shadowed([str(tmp_path / "a"), str(tmp_path / "b")])
    assert line.startswith("acme is installed 2 times: 1.0 in ") and "0.9 in " in line
    assert shadowed([str(tmp_path / "a")]) == []


def test_doctor_tells_its_progress_and_sends_nobody_to_itself(
    site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_dist("sick", name="sick", prelude='raise ImportError("x.so: undefined symbol: _ZN3foo")')
    monkeypatch.setenv("PYTHONPATH", str(site))
    told: list[str] = []
    (row,) = doctor(Catalog.scan(), "sick", told.append)
    assert told == ["attention/sick of sick 1.0 ..."]
    assert row["result"] == "broken" and "undefined symbol: _ZN3foo" in row["detail"]
    assert "rabbet plugins doctor" not in row["detail"]


def test_a_platform_is_asked_whether_it_is_on_this_machine() -> None:
    @register_platform("away")
    class Away(NullPlatform):
        refusals = (Refusal(code="ABSENT", message="no such device"),)

    lines, data = explain(Catalog.of({"platform": {"away": Away, "here": NullPlatform}}), "platform")
    assert data["name"] == "here" and "no such device" in lines[1]
