"""``rabbet-sdk compose``: pairs are covered, refusals told, and a fault that only a pair has is found with both its halves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rabbet_sdk.compose import _Child, axes_of
from rabbet_sdk.strict import install_twins

from rabbet.errors import PluginError

# Two prompts that stand alone in a step meet a kernel of their own, which is wrong: only one policy plans such steps here.
TWO = """
from rabbet.contracts import register_attention_backend
from rabbet_sdk.strict.attention import StrictAttention

@register_attention_backend("two")
class Two(StrictAttention):
    def forward(self, layer, q, k, v, kv_cache, metadata, out):
        super().forward(layer, q, k, v, kv_cache, metadata, out)
        counts = metadata.query_start_cpu.diff().tolist()
        if len(counts) == 2 and min(counts) > 1:
            out[:] = out.flip(0)
"""
LINEAR = """
import os
from rabbet.contracts import Refusal, register_linear_backend
from rabbet.layers.reference import TorchLinearBackend

@register_linear_backend("{name}")
class Linear(TorchLinearBackend):
    @classmethod
    def supports(cls, query):
        return {refusals}

    def apply(self, x_TI, packed, bias_O=None):
        {body}
        return super().apply(x_TI, packed, bias_O)
"""
Run = Callable[..., dict[str, Any]]


def _is_of_other_tests(path: Path, own: Path) -> bool:
    is_installed = path.name in ("site-packages", "dist-packages") or own in path.parents
    return not is_installed and any(path.glob("*.dist-info"))


@pytest.fixture
def compose(fake_dist: Callable[..., str], tmp_path: Path) -> Run:
    fake_dist("acme-two", provides={"attention/two": "acme_two.plugin:Two"}, modules={"plugin.py": TWO})
    for name, body, refusals in (
        ("double", "x_TI = 2 * x_TI", "()"), ("dies", "os._exit(7)", "()"), ("refuses", "pass", "(Refusal(code='NO', message='never'),)"),
    ):  # fmt: skip
        source = LINEAR.format(name=name, body=body, refusals=refusals)
        fake_dist(
            f"acme-{name}", provides={f"linear/{name}": f"acme_{name}.plugin:Linear"}, modules={"plugin.py": source}
        )

    # What other tests of this process have left on the path, beside the twins too, is nobody's business here.
    twins = tmp_path / "twins"
    twins.mkdir()
    install_twins(twins)
    paths = [str(twins), *(path for path in sys.path if path and not _is_of_other_tests(Path(path), tmp_path))]

    def run(*plugins: str, code: int) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "rabbet_sdk", "compose", "platform/cpu", "executor/uni", *plugins, "--json"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, cwd=tmp_path,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.mark.slow
def test_each_pair_stands_in_a_composition_and_a_fault_of_a_pair_names_both(compose: Run) -> None:
    found = compose("attention/two", "attention/cpu", "linear/torch", code=1)
    stood = {pair for row in found["runs"] for pair in combinations(map("/".join, row["composition"].items()), 2)}
    assert {
        (a, b) for a in ("attention/two", "attention/cpu") for b in ("scheduler/fcfs", "scheduler/priority")
    } <= stood
    assert found["pairs"]["covered"] == found["pairs"]["all"] and not found["refused"]
    failed = [row for row in found["runs"] if row["outcome"] == "failed"]
    assert failed and {tuple(row["culprits"]) for row in failed} == {("attention/two", "scheduler/priority")}
    assert all("differs from token" in row["detail"] for row in failed)
    passed = {tuple(row["composition"].items()) for row in found["runs"] if row["outcome"] == "passed"}
    assert any(("attention", "two") in row and ("scheduler", "fcfs") in row for row in passed)


def test_a_fault_of_one_names_it_alone_and_a_refusal_is_no_pass(compose: Run) -> None:
    found = compose("attention/cpu", "scheduler/fcfs", *(f"linear/{n}" for n in ("cpu", "double", "refuses")), code=1)
    rows = {row["composition"]["linear"]: row for row in found["runs"]}
    assert set(rows) == {"cpu", "double"}
    assert rows["cpu"]["outcome"] == "passed"
    assert rows["double"]["culprits"] == ["linear/double"]
    assert [row["names"] for row in found["refused"]] == [["linear/refuses"]] and "never" in found["refused"][0][
        "reason"
    ]
    assert found["pairs"]["refused"] > 0


def test_a_crash_costs_the_composition_that_caused_it(compose: Run, tmp_path: Path) -> None:
    child = _Child(tmp_path)
    assert "status 7" in child.ask({"linear": "dies"})["failed"]
    assert child._process is None


def test_what_has_no_part_in_tokens_cannot_be_composed() -> None:
    with pytest.raises(PluginError, match="hooks/sdk cannot be composed"):
        axes_of(["hooks/sdk"])
