"""Checked mode: off it is the class itself; on, every class goes through what is installed as a checker."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rabbet.registry.checked as checked_module
from rabbet.config.load import parse_configs
from rabbet.config.policy import policy_of
from rabbet.contracts.attention import AttentionQuery
from rabbet.errors import PluginError, PluginLoadError
from rabbet.registry import Catalog, PluginPolicy, compose, select
from rabbet.registry.loader import load_entry

Write = Callable[..., str]
QUERY = AttentionQuery(
    device_type="cpu", arch="avx2", dtype="float32", kv_cache_dtype="float32", num_heads=2, num_kv_heads=1, head_dim=64,
    head_dim_v=64, block_size=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No checker but the test's own, and none that another test has asked."""
    points = checked_module.entry_points
    monkeypatch.setattr(
        checked_module,
        "entry_points",
        lambda group: [item for item in points(group=group) if item.dist.name == "checks"],
    )
    checked_module.checked.cache_clear()
    yield
    checked_module.checked.cache_clear()


def checker(site: Path, monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    info = site / "checks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rabbet.checker]\nchecks = checks_module:check\n")
    module = types.ModuleType("checks_module")
    module.check = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "checks_module", module)


def scan(site: Path, **policy: Any) -> Catalog:
    return Catalog.scan(PluginPolicy(**policy), path=[str(site)])


def test_off_it_is_the_class_itself(site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    checker(site, monkeypatch, lambda kind, cls: pytest.fail("asked"))
    package = fake_dist()
    catalog = scan(site)
    loaded = compose([select(catalog, "attention", name="acme_flash", query=QUERY)]).load("attention")
    assert loaded is sys.modules[package].Backend is load_entry(catalog.find("attention", "acme_flash"))


def test_on_every_class_is_the_checkers_also_where_it_is_asked_and_built(
    site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, type]] = []

    def check(kind: str, cls: type) -> type:
        seen.append((kind, cls))
        return type("Checked", (cls,), {"forward": lambda self, *args: "checked"})

    checker(site, monkeypatch, check)
    package = fake_dist()
    decision = select(scan(site, is_checked=True), "attention", name="acme_flash", query=QUERY)
    composition = compose([decision])
    built = composition.build("attention", None)
    assert built.forward() == "checked" and isinstance(built, sys.modules[package].Backend)
    assert type(built) is composition.load("attention")
    assert seen == [("attention", sys.modules[package].Backend)]


def test_without_the_sdk_the_error_says_what_to_install(site: Path, fake_dist: Write) -> None:
    fake_dist()
    with pytest.raises(PluginError, match="RABBET_CHECK_PLUGINS.*pip install rabbet-sdk"):
        select(scan(site, is_checked=True), "attention", name="acme_flash", query=QUERY)


@pytest.mark.parametrize(
    ("function", "words"), [(lambda kind, cls: 1 // 0, "ZeroDivisionError"), (lambda kind, cls: int, "no subclass")]
)
def test_a_checker_that_fails_is_named(
    site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch, function: Any, words: str
) -> None:
    checker(site, monkeypatch, function)
    fake_dist()
    with pytest.raises(PluginLoadError, match=f"checker checks.*{words}"):
        select(scan(site, is_checked=True), "attention", name="acme_flash", query=QUERY)


def test_the_variable_and_the_flag_switch_it_on() -> None:
    for arguments, environment in (([], {"RABBET_CHECK_PLUGINS": "1"}), (["--check-plugins"], {})):
        assert policy_of(parse_configs(arguments, environment=environment)[0]).is_checked
    assert not policy_of(parse_configs([], environment={})[0]).is_checked
