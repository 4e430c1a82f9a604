"""``rabbet plugins bench`` and ``bisect``, which the SDK adds: what they find, and that they cost nothing unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rabbet_sdk.fakes.dist import write_distribution
from rabbet_sdk.tools.bisect import smallest


def rabbet(*words: str, site: Path | None = None, code: int = 0) -> str:
    path = os.pathsep.join([*([str(site)] if site else []), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "rabbet", *words], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("size", range(1, 8))
def test_halving_finds_each_culprit_and_each_pair(size: int) -> None:
    names = [f"kind/{number}" for number in range(size)]
    for number in (1, 2):
        for guilty in combinations(names, number):

            def run(denied: Sequence[str], guilty: tuple[str, ...] = guilty) -> Any:
                return "passes" if set(guilty) <= set(denied) else "fails"

            found = smallest(names, run)
            # Two that fail alike stand apart: halving needs to deny both at once, and may keep what stands between.
            assert set(guilty) <= set(found) or not found
            assert number > 1 or found == list(guilty)


def test_what_the_command_needs_is_never_blamed() -> None:
    names = [f"kind/{number}" for number in range(9)]

    def run(denied: Sequence[str]) -> Any:
        return "other" if "kind/5" in denied else "passes" if "kind/4" in denied else "fails"

    assert smallest(names, run) == ["kind/4"]
    assert smallest(names, lambda denied: "other" if "kind/5" in denied else "fails") == []
    assert smallest([], lambda denied: "fails") == []


def test_bisect_names_the_plugin_that_makes_a_command_fail(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name in ("one", "two", "three"):
        write_distribution(site, f"acme-{name}", provides={f"logits_processor/{name}": f"acme_{name}:X"})
    script = tmp_path / "fails.py"
    script.write_text(
        "from rabbet.config.load import parse_configs\nfrom rabbet.config.policy import policy_of\n"
        "from rabbet.registry.catalog import Catalog\n"
        "raise SystemExit(3 if 'two' in Catalog.scan(policy_of(parse_configs([])[0])).names('logits_processor') else 0)\n"
    )
    command = ("plugins", "bisect", "--json", "--", sys.executable, str(script))
    found = json.loads(rabbet(*command, site=site))
    assert found["culprits"] == ["logits_processor/two"]
    assert found["runs"][0] == {"denied": [], "outcome": "fails", "status": 3}
    found = json.loads(rabbet("plugins", "bisect", "--json", "--", sys.executable, "-c", "", site=site, code=1))
    assert found["note"] == "the command does not fail" and len(found["runs"]) == 1


def test_bench_compares_values_first_and_gives_ratios_of_one_run(tmp_path: Path) -> None:
    site = tmp_path / "site"
    source = (
        "from rabbet.contracts import register_linear_backend\nfrom rabbet.layers.reference import TorchLinearBackend\n"
        "@register_linear_backend('half')\nclass Half(TorchLinearBackend):\n"
        "    def apply(self, x_TI, packed, bias_O=None):\n        return super().apply(x_TI, packed, bias_O) / 2\n"
    )
    write_distribution(
        site, "acme-half", provides={"linear/half": "acme_half.plugin:Half"}, modules={"plugin.py": source}
    )
    command = ("plugins", "bench", "linear", "half", "torch", "--rounds", "3", "--json")
    rows = json.loads(rabbet(*command, site=site))["rows"]
    assert [row["name"] for row in rows] == ["half", "torch", "torch", "torch"]
    assert "against float64" in rows[0]["problem"] and rows[0]["ratio"] is None
    for row in rows[1:]:
        assert row["ratio"] == pytest.approx(row["median_us"] / row["reference_us"]) and row["ratio"] > 0


def test_bench_times_attention_beside_dense_attention(twins: Path) -> None:
    rows = json.loads(rabbet("plugins", "bench", "attention", "strict", "--rounds", "3", "--json", site=twins))["rows"]
    assert len(rows) == 2 and not any(row["problem"] for row in rows)
    out = rabbet("plugins", "bench", "proposer", code=2)
    assert not out


def test_own_commands_load_no_hook_plugin() -> None:
    """A command of ``rabbet plugins`` that is there asks nobody."""
    code = "import sys; from rabbet.cli.main import main; main(['plugins', 'list'])"
    check = "import atexit, sys; atexit.register(lambda: print('rabbet_sdk.tools.hooks' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{check}\n{code}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "False"


def test_safe_mode_keeps_the_commands_of_the_project_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBET_PLUGINS", "bundled")
    assert "culprit: none found" in rabbet("plugins", "bisect", "--", sys.executable, "-c", "", code=1)
