"""The twenty pains of plugin authors elsewhere, one test each: what removes it here.

Where the part that hurts is not there yet, the test is about the mechanism that will keep it from hurting.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rabbet.config.load import parse_configs
from rabbet.config.plugin_options import check_plugin_options
from rabbet.contracts import KINDS, attention, kv_connector, proposer
from rabbet.errors import (
    CompositionMismatchError,
    ConfigError,
    DuplicatePluginError,
    IncompatiblePluginError,
    PluginLoadError,
    PluginPolicyError,
    PluginRefusedError,
)
from rabbet.registry import Catalog, Composition, PluginPolicy, compose, select
from rabbet.registry.composition import source_hash

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core/src/rabbet"
Write = Callable[..., str]
QUERY = attention.AttentionQuery(
    device_type="cpu", arch="avx2", dtype="float32", kv_cache_dtype="float32", num_heads=2, num_kv_heads=1, head_dim=64,
    head_dim_v=64, block_size=16,
)  # fmt: skip
NEVER = 'raise SystemExit("imported")'


def scan(site: Path, **policy: Any) -> Catalog:
    return Catalog.scan(PluginPolicy(**policy), path=[str(site)])


def choose(site: Path, name: str | None = "acme_flash", **policy: Any) -> Any:
    return select(scan(site, **policy), "attention", name=name, query=QUERY)


def contract_class(kind: str) -> type:
    module, name = KINDS[kind].base.split(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def test_pain_01_a_broken_plugin_that_was_named_is_never_replaced_by_another(site: Path, fake_dist: Write) -> None:
    fake_dist("bad", name="bad", prelude='raise ImportError("libaccel.so.2")')
    fake_dist("good", name="good", bundled=True)
    with pytest.raises(PluginLoadError, match=r"bad 1\.0.*libaccel\.so\.2"):
        choose(site, "bad")


def test_pain_02_a_load_that_failed_fails_again_with_the_same_error(site: Path, fake_dist: Write) -> None:
    fake_dist(prelude="raise RuntimeError('half')")
    catalog, errors = scan(site), []
    for _ in range(3):
        with pytest.raises(PluginLoadError) as caught:
            select(catalog, "attention", name="acme_flash", query=QUERY)
        errors.append(caught.value)
    assert errors[0] is errors[1] is errors[2]


def test_pain_03_a_rule_is_trimmed_and_one_that_matches_nothing_is_an_error(site: Path, fake_dist: Write) -> None:
    fake_dist()
    assert choose(site, allow=(" acme_flash ",)).name == "acme_flash"
    with pytest.raises(PluginPolicyError, match="did you mean acme_flash"):
        scan(site, allow=("acme_flsh",))


def test_pain_04_every_contract_has_a_kept_signature_that_a_test_compares() -> None:
    for kind in KINDS.values():
        kept = json.loads((ROOT / f"core/src/rabbet/contracts/signatures/{kind.name}.json").read_text())
        assert kept["version"] == kind.version and kept["classes"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/contract_signatures.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_pain_05_facts_travel_in_frozen_objects_and_a_missing_argument_is_told_at_load(
    site: Path, fake_dist: Write
) -> None:
    for cls in (attention.AttentionQuery, proposer.DraftBatch):
        assert cls.__dataclass_params__.frozen and all(field.kw_only for field in dataclasses.fields(cls))  # type: ignore[attr-defined]
    package = fake_dist()
    source = site / package / "__init__.py"
    source.write_text(source.read_text().replace("kv_cache, metadata, out_THE", "kv_cache, out_THE"))
    with pytest.raises(PluginLoadError, match="has forward.*but the contract calls it as"):
        choose(site)


def test_pain_06_the_range_is_checked_before_the_import_that_would_crash(site: Path, fake_dist: Write) -> None:
    fake_dist(contract=">=9,<10", prelude="import rabbet.module_of_the_future")
    with pytest.raises(IncompatiblePluginError, match=r"acme 1\.0 offers attention 'acme_flash' for contract >=9,<10"):
        choose(site)


def test_pain_07_a_cache_layout_is_data_with_a_name_that_peers_compare() -> None:
    names = {field.name for field in dataclasses.fields(attention.KVLayout)}
    assert {"name", "axes", "shape", "dtype"} <= names
    flat, other = (
        attention.KVLayout(name=name, axes=("slot",), shape=(16,), dtype="uint8") for name in ("nhd-1", "nhd-2")
    )
    assert flat != other


def test_pain_08_a_patch_of_core_is_found_named_and_refused_by_strict(
    site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rabbet.registry.names as names

    monkeypatch.setattr(names, "nearest", names.nearest)
    fake_dist(prelude="import rabbet.registry.names as n\nn.nearest = lambda *a, **k: []\n")
    composition = compose([choose(site)])
    settled = composition.settled(is_strict=False)
    assert settled.tampered == (("acme 1.0", "rabbet.registry.names:nearest"),) and settled.digest != composition.digest
    with pytest.raises(PluginPolicyError, match="--plugins-strict"):
        composition.settled(is_strict=True)


def test_pain_09_what_was_decided_crosses_processes_as_data_and_is_verified_there(site: Path, fake_dist: Write) -> None:
    package = fake_dist()
    sent = msgspec.msgpack.encode(compose([choose(site)]))
    code = (
        "import sys, msgspec; sys.path.insert(0, sys.argv[1])\nfrom rabbet.registry import Composition\n"
        "c = msgspec.convert(msgspec.msgpack.decode(bytes.fromhex(sys.argv[2])), Composition)\nc.verify()\n"
        "print(c.load('attention').__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site), sent.hex()], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == package, done.stderr


def test_pain_10_two_owners_of_a_name_are_an_error_that_names_both_before_any_import(
    site: Path, fake_dist: Write
) -> None:
    fake_dist("one", name="flash", prelude=NEVER)
    fake_dist("two", name="flash", prelude=NEVER)
    with pytest.raises(DuplicatePluginError, match=r"one 1\.0 and two 1\.0.*--plugin-prefer"):
        choose(site, "flash")


def test_pain_11_a_vendor_has_as_many_names_as_he_wants_and_flags_take_any_of_them(
    site: Path, fake_dist: Write
) -> None:
    fake_dist("mha", name="vendor_mha")
    fake_dist("mla", name="vendor_mla")
    assert [choose(site, name).name for name in ("vendor_mha", "vendor-MLA")] == ["vendor_mha", "vendor_mla"]
    assert parse_configs(["--attention-backend", "vendor_mla"])[0].attention.backend == "vendor_mla"


def test_pain_12_proposers_have_one_contract_and_core_asks_none_who_it_is() -> None:
    assert list(inspect.signature(proposer.Proposer.propose).parameters) == ["self", "batch"]
    names = ("ngram", "eagle", "medusa", "mtp")
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            word = getattr(node, "attr", None) or getattr(node, "id", None) or ""
            assert word not in {f"is_{name}" for name in names} | {f"use_{name}" for name in names}, path


def test_pain_13_the_result_of_a_load_is_something_that_a_connector_has_to_return() -> None:
    """No method of the worker's half that reports loads may be left out, and none answers with a bare set of names."""
    module = kv_connector
    abstract = [
        (cls.__name__, name)
        for cls in (getattr(module, item) for item in module.__all__)
        if inspect.isclass(cls)
        for name in getattr(cls, "__abstractmethods__", ())
    ]
    assert abstract
    for cls_name, name in abstract:
        returned = str(inspect.signature(getattr(getattr(module, cls_name), name)).return_annotation)
        assert returned and not returned.startswith("set["), (cls_name, name, returned)


def test_pain_14_listing_imports_neither_a_plugin_nor_torch(site: Path, fake_dist: Write) -> None:
    package = fake_dist(prelude=NEVER)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom rabbet.registry.catalog import Catalog\n"
        "from rabbet.registry.describe import list_plugins\nassert any(r['name'] == 'acme_flash' for r in list_plugins(Catalog.scan()))\n"
        "assert not {'torch', sys.argv[2]} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(site), package], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pain_15_options_have_a_place_and_a_schema_and_are_checked_before_any_load(
    site: Path, fake_dist: Write
) -> None:
    package = fake_dist(prelude=NEVER, extra='options = "options.json"\n')
    schema = {"type": "object", "properties": {"tile": {"type": "integer"}}, "additionalProperties": False}
    (site / package / "options.json").write_text(json.dumps(schema))
    catalog = scan(site)
    check_plugin_options({"acme-flash": {"tile": 4}}, catalog)
    with pytest.raises(ConfigError, match="did you mean tile"):
        check_plugin_options({"acme-flash": {"tiel": 4}}, catalog)


def test_pain_16_a_compiled_part_for_another_torch_is_refused_before_it_is_opened(site: Path, fake_dist: Write) -> None:
    fake_dist(prelude=NEVER, extra='[provides.native]\nextensions = ["x._C"]\ntorch = "==1.0"\nabi = "pinned:1.0"\n')
    with pytest.raises(IncompatiblePluginError, match="built for torch ==1.0"):
        choose(site)


def test_pain_17_one_package_reads_entry_points_and_one_policy_hides_every_kind(site: Path, fake_dist: Write) -> None:
    readers = {
        path.relative_to(CORE).parts[0]
        for path in CORE.rglob("*.py")
        if "entry_points(" in path.read_text(encoding="utf-8")
    }
    assert readers == {"registry"}
    for kind in KINDS.values():
        fake_dist(f"d{kind.name}", name="same", group=kind.group, prelude=NEVER)
    catalog = scan(site, allow=("dattention",))
    assert [kind for kind in KINDS if "same" in catalog.names(kind)] == ["attention"]


def test_pain_18_the_digest_changes_with_the_code_of_a_plugin(site: Path, fake_dist: Write) -> None:
    package = fake_dist()
    decision = choose(site)
    first = compose([decision])
    (site / package / "kernels.py").write_text("BLOCK = 128\n")
    source_hash.cache_clear()
    assert compose([decision]).digest != first.digest
    with pytest.raises(CompositionMismatchError):
        first.verify()


def test_pain_19_a_choice_has_a_scope_and_is_obeyed_or_refused_there(site: Path, fake_dist: Write) -> None:
    fake_dist(refusals='(Refusal(code="WINDOW", message="no windows"),) if query.window else ()')
    fake_dist("spare", name="spare", bundled=True)
    catalog = scan(site)
    target = select(catalog, "attention", name="acme_flash", query=QUERY)
    windowed = dataclasses.replace(QUERY, window=8, scope="drafter")
    with pytest.raises(PluginRefusedError, match="WINDOW"):
        select(catalog, "attention", name="acme_flash", query=windowed, scope="drafter")
    drafter = select(catalog, "attention", name=None, query=windowed, scope="drafter")
    composition = compose([target, drafter])
    assert isinstance(composition, Composition)
    assert (composition.name("attention"), composition.name("attention", "drafter")) == ("acme_flash", "spare")


def test_pain_20_the_suite_shards_reloads_and_poisons_and_each_has_a_planted_fault_that_it_must_catch() -> None:
    from rabbet_sdk.conformance.quantization import QuantizationConformance

    faults = (ROOT / "sdk/src/rabbet_sdk/mutants/quantization.py").read_text(encoding="utf-8")
    for test in ("ranks_reassemble_to_the_whole", "loading_again_replaces_everything", "nan_stays_in_its_row"):
        assert callable(getattr(QuantizationConformance, f"test_{test}")) and f'"{test}"' in faults
