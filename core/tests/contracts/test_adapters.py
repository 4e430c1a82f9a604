"""Contract versions: what a range means, how a misfit is told, and that the major before is served through an adapter."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rabbet.contracts import KINDS
from rabbet.contracts.logits_processor import LogitsBatch, LogitsProcessorContext
from rabbet.errors import IncompatiblePluginError, PluginLoadError
from rabbet.registry import Catalog, Composition, PluginPolicy, compose, select, versions
from rabbet.registry.entry import State

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("registry_conftest", ROOT / "core/tests/registry/conftest.py")
assert _spec is not None and _spec.loader is not None
_conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_conftest)
site, fake_dist, forget_staged = _conftest.site, _conftest.fake_dist, _conftest.forget_staged

Write = Callable[..., str]
PROCESSOR = """
from rabbet.contracts import register_logits_processor
from rabbet.contracts.logits_processor import LogitsProcessor
@register_logits_processor("block")
class Backend(LogitsProcessor):
    def add(self, slot, sampling, prompt_token_ids):
        pass
    def remove(self, slot):
        pass
    def apply(self, {arguments}):
        {body}
"""
OLD = PROCESSOR.format(
    arguments="logits_BV, slots, output_token_ids",
    body="logits_BV[:, len(output_token_ids[0])] = -9.0; return logits_BV",
)
NEW = PROCESSOR.format(arguments="batch", body="batch.logits_BV[:, 1] = -9.0; return batch.logits_BV")


def scan(site: Path) -> Catalog:
    return Catalog.scan(PluginPolicy(), path=[str(site)])


def processor(fake_dist: Write, body: str, contract: str) -> str:
    return fake_dist(name="block", group="rabbet.logits_processor", body=body, contract=contract)


def applied(cls: Any) -> list[float]:
    made = cls(LogitsProcessorContext(device=torch.device("cpu"), max_num_requests=1, vocab_size=3))
    return made.apply(LogitsBatch(logits_BV=torch.zeros(1, 3), slots=[0], output_token_ids=[[7]])).tolist()[0]


@pytest.mark.parametrize(
    ("body", "contract", "used"), [(OLD, ">=1.0,<2", "1.0"), (NEW, ">=2.0,<3", "2.0"), (NEW, ">=1.0", "2.0")]
)
def test_both_majors_are_served_and_the_composition_says_which(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture, body: str, contract: str, used: str
) -> None:
    package = processor(fake_dist, body, contract)
    decision = select(scan(site), "logits_processor", name="block")
    assert decision.contract == used and f"contract {used}" in decision.lines()[0]
    composition = compose([decision])
    again = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(composition)), Composition)
    cls = again.load("logits_processor")
    assert applied(cls) == [0.0, -9.0, 0.0] and again.load("logits_processor") is cls
    own = sys.modules[package].Backend
    assert (cls is own) is (used == "2.0") and issubclass(cls, own)
    told = [record.getMessage() for record in caplog.records if "adapter" in record.getMessage()]
    assert len(told) == (used == "1.0") and all("docs/migrations/logits_processor-2.md" in line for line in told)
    assert (ROOT / "docs/migrations/logits_processor-2.md").is_file()


@pytest.mark.parametrize(("body", "contract"), [(NEW, ">=1.0,<2"), (OLD, ">=2.0,<3")])
def test_a_class_that_fits_not_the_contract_that_it_declares_is_refused_at_load(
    site: Path, fake_dist: Write, body: str, contract: str
) -> None:
    processor(fake_dist, body, contract)
    with pytest.raises(PluginLoadError, match="apply|does not fit contract 1.0"):
        compose([select(scan(site), "logits_processor", name="block")]).load("logits_processor")


@pytest.mark.parametrize(
    ("contract", "advice"),
    [(">=3,<4", "Upgrade rabbet-core"), (">=0.5,<1", "Upgrade the plugin"), ("newest", "no version range")],
)
def test_a_range_that_nothing_speaks_is_refused_before_import_with_both_versions_and_what_to_do(
    site: Path, fake_dist: Write, contract: str, advice: str
) -> None:
    processor(fake_dist, 'raise SystemExit("imported")', contract)
    catalog = scan(site)
    assert catalog.entries[0].state is State.INCOMPATIBLE
    with pytest.raises(IncompatiblePluginError, match=advice) as caught:
        select(catalog, "logits_processor", name="block")
    told = str(caught.value)
    assert told.startswith("acme 1.0 offers logits_processor 'block' for contract ")
    assert contract == "newest" or f"{contract}; this core speaks 1.0 and 2.0" in told


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ("==0.3", ""),
        (">=0.3,<0.4", ""),
        (">=0.3", "provisional"),
        (">=0.2,<0.4", "provisional"),
        ("==0.2", "speaks 0.3"),
    ],
)
def test_a_provisional_contract_has_to_be_meant_exactly(
    monkeypatch: pytest.MonkeyPatch, declared: str, problem: str
) -> None:
    monkeypatch.setitem(KINDS, "attention", replace(KINDS["attention"], version="0.3"))
    found = versions.contract_problem("attention", declared)
    assert problem in found if problem else found == ""


def test_the_dumps_of_both_majors_differ_in_what_the_migration_page_says() -> None:
    spec = importlib.util.spec_from_file_location("contract_signatures", ROOT / "scripts/contract_signatures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    old = json.loads((ROOT / "core/src/rabbet/contracts/signatures/history/logits_processor-1.0.json").read_text())
    new = json.loads((ROOT / "core/src/rabbet/contracts/signatures/logits_processor.json").read_text())
    assert (old["version"], new["version"]) == ("1.0", "2.0")
    found = {text.split(" ")[0]: level for level, text in script.differences(old, new)}
    assert found == {"LogitsBatch": "minor", "LogitsProcessor.apply": "major"}
