"""Plugins that change core: when they do it, how it is told, and what is no such change."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rabbet.contracts.attention import AttentionQuery
from rabbet.errors import PluginPolicyError
from rabbet.registry import Catalog, Composition, HookBus, PluginPolicy, compose, select
from rabbet.registry.describe import doctor
from rabbet.registry.tamper import evidence, look, watch

Write = Callable[..., str]
QUERY = AttentionQuery(
    device_type="cpu", arch="avx2", dtype="float32", kv_cache_dtype="float32", num_heads=2, num_kv_heads=1, head_dim=64,
    head_dim_v=64, block_size=16,
)  # fmt: skip
PLACE = "rabbet.registry.names:nearest"
REPLACE = "import rabbet.registry.names as names\nnames.nearest = lambda *a, **k: []\n"
WAYS = {
    "function": (REPLACE, PLACE),
    "code": ("from rabbet.registry.names import nearest\nnearest.__code__ = (lambda name, known, *, count=3: []).__code__\n", PLACE),
    "defaults": ("from rabbet.registry.names import nearest\nnearest.__kwdefaults__ = {'count': 9}\n", PLACE),
    "name held elsewhere": ("import rabbet.registry.catalog as c\nc.nearest = print\n", "rabbet.registry.catalog:nearest"),
    "method": ("from rabbet.registry import Catalog\nCatalog.names = lambda self, kind: ()\n", "rabbet.registry.catalog:Catalog.names"),
    "class method": ("from rabbet.registry import Catalog\nCatalog.of = classmethod(lambda cls, x: None)\n", "rabbet.registry.catalog:Catalog.of"),
    "property": ("from rabbet.registry.entry import Entry\nEntry.label = property(lambda self: 'x')\n", "rabbet.registry.entry:Entry.label"),
    "added": ("from rabbet.registry import Catalog\nCatalog.__len__ = lambda self: 0\n", "rabbet.registry.catalog:Catalog.__len__"),
    "removed": ("from rabbet.registry import Catalog\ndel Catalog.names\n", "rabbet.registry.catalog:Catalog.names"),
    "class": ("import rabbet.registry.catalog as c\nclass Catalog(c.Catalog): pass\nc.Catalog = Catalog\n", "rabbet.registry.catalog:Catalog"),
    "wrapped": (
        "import functools, rabbet.registry.names as n\ndef wrap(f):\n    @functools.wraps(f)\n    def inner(*a, **k):\n        return f(*a, **k)\n"
        "    return inner\nn.nearest = wrap(n.nearest)\n",
        PLACE,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    """Whatever a test's plugin does to core is undone."""
    import rabbet.registry.catalog as catalog
    import rabbet.registry.entry as entry
    import rabbet.registry.names as names

    function, targets = names.nearest, (names, catalog, catalog.Catalog, entry.Entry)
    code, defaults = function.__code__, function.__kwdefaults__
    saved = [{name: value for name, value in vars(target).items() if not name.startswith("__")} for target in targets]
    look()
    before = evidence()
    yield
    function.__code__, function.__kwdefaults__ = code, defaults
    for target, members in zip(targets, saved, strict=True):
        for name, value in members.items():
            if vars(target).get(name) is not value:
                setattr(target, name, value)
    if "__len__" in vars(catalog.Catalog):
        del catalog.Catalog.__len__
    assert evidence() == before


def scan(site: Path, **policy: Any) -> Catalog:
    return Catalog.scan(PluginPolicy(**policy), path=[str(site)])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_at_import_is_told_once_with_its_owner_and_enters_the_digest(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    prelude, place = WAYS[way]
    fake_dist(prelude=prelude)
    decision = select(scan(site), "attention", name="acme_flash", query=QUERY)
    composition = compose([decision])
    settled = composition.settled(is_strict=False)
    assert settled.tampered == (("acme 1.0", place),)
    assert settled.digest != composition.digest and settled.parts == composition.parts
    told = [line for line in warnings(caplog) if "changes Rabbet itself" in line]
    assert len(told) == 1 and "acme 1.0" in told[0] and place in told[0] and "--plugins-strict" in told[0]
    with pytest.raises(PluginPolicyError, match=r"acme 1\.0 changes rabbet.*--plugins-strict"):
        composition.settled(is_strict=True)


def test_a_plugin_that_changes_nothing_leaves_no_trace_and_the_digest_alone(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture
) -> None:
    harmless = (
        "import functools\nimport rabbet\nfrom rabbet import SamplingParams\nfrom rabbet.registry.names import nearest\n"
        "import rabbet.front.detok\n@functools.cache\ndef own():\n    return nearest('a', ['b'])\nown()\n"
        "class Params(SamplingParams):\n    def clone(self, **changes):\n        return self\n"
    )
    fake_dist(prelude=harmless)
    composition = compose([select(scan(site), "attention", name="acme_flash", query=QUERY)])
    assert composition.settled(is_strict=True) is composition
    assert not warnings(caplog)


def test_a_change_in_the_constructor_is_the_plugins(site: Path, fake_dist: Write) -> None:
    fake_dist(prelude="")
    package = fake_dist("late", name="late")
    source = site / package / "__init__.py"
    text = source.read_text().replace(
        "    def build_metadata",
        f"    def __init__(self, context):\n        {REPLACE.replace(chr(10), '; ')}\n    def build_metadata",
    )
    source.write_text(text)
    composition = compose([select(scan(site), "attention", name="late", query=QUERY)])
    assert composition.settled(is_strict=True).tampered == ()
    assert type(composition.build("attention", None)).__name__ == "Backend"
    assert composition.settled(is_strict=False).tampered == (("late 1.0", PLACE),)


def test_a_change_made_later_is_known_by_whose_code_it_is(site: Path, fake_dist: Write) -> None:
    package = fake_dist(
        prelude="def strike():\n    import rabbet.registry.names as n\n    n.nearest = lambda *a, **k: []\n"
    )
    fake_dist("other", name="other")
    catalog = scan(site)
    compose([select(catalog, "attention", name="acme_flash", query=QUERY)]).load("attention")
    importlib.import_module(package).strike()
    # The next load comes from somebody else, who has nothing to do with it.
    composition = compose([select(catalog, "attention", name="other", query=QUERY)])
    assert composition.settled(is_strict=False).tampered == (("acme 1.0", PLACE),)


def test_a_change_in_a_module_that_the_plugin_itself_imports_first_is_seen(
    site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = types.ModuleType("rabbet.late_part")
    exec("def work():\n    return 1\n", late.__dict__)
    fake_dist(
        prelude="import sys, late_holder\nsys.modules['rabbet.late_part'] = late_holder.late\nlate_holder.late.work = lambda: 2\n"
    )
    holder = types.ModuleType("late_holder")
    holder.late = late  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_holder", holder)
    composition = compose([select(scan(site), "attention", name="acme_flash", query=QUERY)])
    assert composition.settled(is_strict=False).tampered == (("acme 1.0", "rabbet.late_part:work"),)
    del sys.modules["rabbet.late_part"]


def test_a_change_that_was_there_before_the_plugin_was_first_asked_for_is_seen(site: Path, fake_dist: Write) -> None:
    """A script imports the plugin itself, and only then builds an engine."""
    package = fake_dist(prelude=REPLACE)
    importlib.import_module(package)
    composition = compose([select(scan(site), "attention", name="acme_flash", query=QUERY)])
    assert composition.settled(is_strict=False).tampered == (("acme 1.0", PLACE),)


def test_the_first_use_of_the_configuration_is_no_change_of_it() -> None:
    """Pydantic completes classes late. In a process of its own: here they are complete already."""
    code = (
        "from rabbet.registry.tamper import evidence, look\n"
        "import rabbet.config.load as load\n"
        "look()\n"
        "first = load.engine_config_from_kwargs('nowhere', max_model_len=64)\n"
        "print(evidence(), first.model.model)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "() nowhere" and not done.stderr, done.stderr


def test_a_change_that_is_undone_is_no_evidence_any_more() -> None:
    import rabbet.registry.names as names

    original, before = names.nearest, evidence()
    with watch("acme 1.0", "nowhere:X"):
        names.nearest = functools.partial(original, count=1)  # type: ignore[assignment]
    assert set(evidence()) - set(before) == {("acme 1.0", PLACE)}
    names.nearest = original
    assert evidence() == before


def test_evidence_crosses_processes_with_the_composition(site: Path, fake_dist: Write) -> None:
    import msgspec

    fake_dist(prelude=REPLACE)
    settled = compose([select(scan(site), "attention", name="acme_flash", query=QUERY)]).settled(is_strict=False)
    again = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(settled)), Composition)
    assert again == settled
    more = again.settled(is_strict=False, more=[["rank 1: acme 1.0", "rabbet.x:f"]])
    assert len(more.tampered) == 2 and more.digest != again.digest


@pytest.mark.parametrize("place", ["module", "constructor"])
def test_hooks_that_change_core_are_told_and_strict_refuses_them(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    line = REPLACE.strip().replace("\n", "; ")
    body = (
        "from rabbet.contracts import register_hooks\nfrom rabbet.contracts.hooks import Hooks, hookimpl\n"
        f"{line if place == 'module' else ''}\n@register_hooks('spy')\nclass Backend(Hooks):\n    def __init__(self):\n"
        f"        {line if place == 'constructor' else 'pass'}\n"
        "    @hookimpl\n    def bug_report_sections(self):\n        return {'a': 'b'}\n"
    )
    fake_dist("spy", name="spy", group="rabbet.hooks", body=body)
    with pytest.raises(PluginPolicyError, match=r"spy 1\.0 changes rabbet.*nearest"):
        HookBus.load(scan(site, is_strict=True), PluginPolicy(is_strict=True))
    assert any("spy 1.0 changes Rabbet itself" in line for line in warnings(caplog))


def test_doctor_reports_the_state_tampered(site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    fake_dist("bad", name="bad", prelude=REPLACE)
    row = doctor(scan(site), "bad")[0]
    assert (row["ok"], row["state"]) == (False, "tampered") and PLACE in row["detail"]
