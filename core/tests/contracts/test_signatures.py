"""Signatures of contracts are kept as JSON; a change is seen, judged, and needs a version."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet.contracts import KINDS

ROOT = Path(__file__).parents[3]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_signatures", ROOT / "scripts/contract_signatures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


def kept(kind: str) -> dict[str, Any]:
    return json.loads((script.DUMPS / f"{kind}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_contract_is_what_its_file_says(kind: Any) -> None:
    old, new = kept(kind.name), json.loads(script.text_of(kind))
    problem = script.advice(kind.name, old, new)
    assert not problem, problem
    assert old == new, "run python scripts/contract_signatures.py"


def test_a_dump_holds_what_a_plugin_sees_of_a_contract() -> None:
    classes = kept("attention")["classes"]
    assert {"AttentionBackend", "AttentionQuery", "AttentionBatch", "KVCacheSpec", "Refusal"} <= set(classes)
    assert classes["AttentionQuery"]["fields"]["window"] == {"type": "int | None", "default": "None"}
    forward = classes["AttentionBackend"]["methods"]["forward"]
    assert forward["is_abstract"] and [item["name"] for item in forward["parameters"]][:3] == ["self", "layer", "q_THD"]
    assert classes["GraphSupport"]["members"]["NEVER"] == "never"
    assert classes["AttentionBackend"]["methods"]["supports"]["shape"] == "classmethod"
    assert "MoEBackend" not in kept("linear")["classes"] and "LinearBackend" not in kept("moe")["classes"]


BACKEND, QUERY = "AttentionBackend", "AttentionQuery"
BODY = {"shape": "function", "is_abstract": False, "parameters": [], "returns": "None"}


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        (lambda c: c[QUERY]["fields"].update(new={"type": "int", "default": "0"}), "minor", "AttentionQuery.new is new"),
        (lambda c: c[QUERY]["fields"].update(new={"type": "int"}), "major", "without a default"),
        (lambda c: c[QUERY]["fields"].pop("window"), "major", "AttentionQuery.window is gone"),
        (lambda c: c[QUERY]["fields"]["window"].update(type="str"), "major", "AttentionQuery.window was"),
        (lambda c: c[QUERY]["fields"]["window"].update(default="1"), "major", "AttentionQuery.window was"),
        (lambda c: c[BACKEND]["methods"].update(new=BODY), "minor", "AttentionBackend.new is new"),
        (lambda c: c[BACKEND]["methods"].update(new={**BODY, "is_abstract": True}), "major", "plugins must have"),
        (lambda c: c[BACKEND]["methods"]["forward"]["parameters"].pop(), "major", "AttentionBackend.forward was"),
        (lambda c: c[BACKEND]["methods"]["forward"].update(is_abstract=False), "minor", "optional now"),
        (lambda c: c[BACKEND]["methods"]["block_sizes"].update(is_abstract=True), "major", "abstract now"),
        (lambda c: c["GraphSupport"]["members"].update(NEW="new"), "minor", "GraphSupport.NEW is new"),
        (lambda c: c["GraphSupport"]["members"].pop("NEVER"), "major", "GraphSupport.NEVER is gone"),
        (lambda c: c.pop("KVLayout"), "major", "KVLayout is gone"),
        (lambda c: c.update(New={"fields": {}}), "minor", "New is new"),
    ],
)  # fmt: skip
def test_a_change_is_judged_and_the_message_says_what_to_do(change: Any, level: str, words: str) -> None:
    old = kept("attention")
    new = copy.deepcopy(old)
    change(new["classes"])
    assert [item for item, _ in script.differences(old, new)] == [level]
    major, minor = (int(part) for part in old["version"].split("."))
    wanted = f"{major}.{minor + 1}" if level == "minor" else f"{major + 1}.0"
    problem = script.advice("attention", old, new)
    assert words in problem and f"raise its version to {wanted}" in problem and "CHANGELOG" in problem
    assert ("adapter" in problem) is (level == "major")
    assert script.advice("attention", old, {**new, "version": wanted}) == ""
    assert bool(script.advice("attention", old, {**new, "version": f"{major}.{minor + 1}"})) is (level == "major")
