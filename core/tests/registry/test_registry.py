"""Discovery, policy, selection, failures and the composition. Names in brackets are pains of plugin authors elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rabbet.contracts import register_attention_backend, registrations_of
from rabbet.contracts.attention import AttentionBackend, AttentionQuery
from rabbet.errors import (
    CompositionMismatchError,
    DuplicatePluginError,
    IncompatiblePluginError,
    PluginLoadError,
    PluginPolicyError,
    PluginRefusedError,
    UnknownPluginError,
)
from rabbet.registry import Catalog, Composition, HookBus, PluginPolicy, compose, select
from rabbet.registry.describe import doctor, explain, list_plugins, plugin_info, shadowed
from rabbet.registry.discover import discover
from rabbet.registry.entry import State

Write = Callable[..., str]
QUERY = AttentionQuery(
    device_type="cpu", arch="avx2", dtype="float32", kv_cache_dtype="float32", num_heads=2, num_kv_heads=1, head_dim=64,
    head_dim_v=64, block_size=16,
)  # fmt: skip


def scan(site: Path, **policy: object) -> Catalog:
    return Catalog.scan(PluginPolicy(**policy), path=[str(site)])


def test_listing_imports_nothing(site: Path, fake_dist: Write) -> None:
    package = fake_dist(prelude='raise SystemExit("imported")')
    rows = list_plugins(scan(site))
    assert [(row["kind"], row["name"], row["distribution"], row["state"]) for row in rows] == [
        ("attention", "acme_flash", "acme", "compatible")
    ]
    assert package not in sys.modules


def test_what_a_build_left_beside_the_sources_is_told_once(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture
) -> None:
    package = fake_dist()
    points = site / "acme-1.0.dist-info/entry_points.txt"
    points.write_text(points.read_text() + f"[rabbet.linear]\nacme_a = {package}:A\nacme_b = {package}:B\n")
    left = site / "acme.egg-info"
    left.mkdir()
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (left / "entry_points.txt").write_text(points.read_text())
    assert len(scan(site).entries) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "acme is installed twice (editable and as a wheel?) and taken once; rabbet plugins doctor shows where"
    ]


def test_what_an_editable_build_left_beside_the_sources_is_no_second_installation(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """``pip install -e`` with setuptools leaves it, so that every plugin's author would be warned at each command."""
    fake_dist()
    info = site / "acme-1.0.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///acme", "dir_info": {"editable": true}}')
    left = site / "src/acme.egg-info"
    left.mkdir(parents=True)
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (left / "entry_points.txt").write_text((info / "entry_points.txt").read_text())
    places = [str(site), str(site / "src")]
    count = len(scan(site).entries)
    caplog.clear()
    assert len(discover(places).entries) == count and not caplog.records
    assert shadowed(places) == []
    # Nothing else says what they are: then they are what is there.
    assert len(discover([str(site / "src")]).entries) == count


def test_name_is_found_whatever_its_case_and_dashes(site: Path, fake_dist: Write) -> None:
    fake_dist()
    catalog = scan(site)
    for spelling in ("acme_flash", "Acme-Flash", "acme:ACME_FLASH"):
        assert select(catalog, "attention", name=spelling, query=QUERY).name == "acme_flash"


def test_unknown_name_lists_what_there_is_and_what_was_meant(site: Path, fake_dist: Write) -> None:
    fake_dist()
    with pytest.raises(UnknownPluginError, match="did you mean acme_flash.*installed: acme_flash.*pip install"):
        select(scan(site), "attention", name="acme_flsh")


def test_broken_plugin_that_is_not_chosen_hurts_nobody(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture
) -> None:
    fake_dist("bad", name="bad", priority=45, prelude='raise ImportError("libfoo.so.7 is missing")')
    fake_dist("good", name="good", priority=10)
    decision = select(scan(site, auto="any"), "attention", name=None, query=QUERY)
    assert decision.name == "good"
    assert [(item.name, item.state) for item in decision.rejected] == [("bad", "broken")]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "libfoo.so.7 is missing" in warnings[0] and "bad 1.0" in warnings[0]


@pytest.mark.parametrize("raised", ["1 // 0", "sys.exit(1)"])
def test_plugin_whose_supports_raises_is_passed_over_by_auto_and_fatal_by_name(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture, raised: str
) -> None:
    fake_dist("bad", name="bad", priority=45, refusals=raised)
    fake_dist("good", name="good", priority=10)
    catalog = scan(site, auto="any")
    assert select(catalog, "attention", name=None, query=QUERY).name == "good"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "attention/bad of bad 1.0" in warnings[0] and "supports()" in warnings[0]
    with pytest.raises(
        PluginLoadError, match=r"attention/bad of bad 1\.0 failed in supports\(\): (ZeroDiv|SystemExit)"
    ):
        select(catalog, "attention", name="bad", query=QUERY)


@pytest.mark.parametrize("prelude", ['raise ImportError("libfoo.so.7 is missing")', 'sys.exit("no licence")'])
def test_broken_plugin_that_is_chosen_is_fatal_with_owner_and_cause_every_time(
    site: Path, fake_dist: Write, prelude: str
) -> None:
    """[vllm: the second call returned quietly with half of the plugins registered]"""
    fake_dist("bad", name="bad", prelude=prelude)
    catalog = scan(site)
    errors = []
    for _ in range(2):
        with pytest.raises(PluginLoadError, match=r"attention/bad of bad 1\.0 failed to load") as caught:
            select(catalog, "attention", name="bad", query=QUERY)
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert isinstance(errors[0].__cause__, ImportError | SystemExit)


def test_strict_policy_makes_a_passed_over_plugin_fatal(site: Path, fake_dist: Write) -> None:
    fake_dist("bad", name="bad", priority=45, prelude='raise ImportError("x")')
    fake_dist("good", name="good", priority=10)
    with pytest.raises(PluginPolicyError, match="attention/bad.*--plugins-strict"):
        select(scan(site, auto="any", is_strict=True), "attention", name=None, query=QUERY)


@pytest.mark.parametrize(
    ("code", "claims", "is_fatal"),
    [
        ("NO_DEVICE", "", False),
        ("DEVICE", "", False),
        ("ARCH", "", False),
        ("HEAD_DIM", "", True),
        ("NO_DEVICES", "", True),
        ("", 'device = ["other"]', False),
        ("", 'arch = ["sm_*"]', False),
        ("", 'dtype = ["float8"]', True),
    ],
)
def test_strict_is_about_plugins_that_fail_on_their_own_hardware_not_about_those_for_other(
    site: Path, fake_dist: Write, code: str, claims: str, is_fatal: bool
) -> None:
    refusals = f"(Refusal(code={code!r}, message='no'),)" if code else "()"
    extra = f"[provides.claims]\n{claims}\n" if claims else ""
    fake_dist("far", name="far", priority=45, refusals=refusals, extra=extra)
    fake_dist("near", name="near", priority=10)
    catalog = scan(site, auto="any", is_strict=True)
    if is_fatal:
        with pytest.raises(PluginPolicyError, match="attention/far.*refused.*--plugins-strict"):
            select(catalog, "attention", name=None, query=QUERY)
    else:
        decision = select(catalog, "attention", name=None, query=QUERY)
        assert (decision.name, decision.rejected[0].state) == ("near", "refused")


def test_explicit_choice_is_obeyed_or_refused_with_all_reasons(site: Path, fake_dist: Write) -> None:
    """[vllm#53450: an explicit choice was dropped silently]"""
    refusals = '(Refusal(code="HEAD_DIM", message="64"), Refusal(code="DTYPE", message="float32", fix="--dtype half"))'
    fake_dist(refusals=refusals)
    fake_dist("other", name="other")
    with pytest.raises(PluginRefusedError, match=r"HEAD_DIM: 64; DTYPE: float32 \(try: --dtype half\)") as caught:
        select(scan(site), "attention", name="acme_flash", query=QUERY)
    assert [refusal.code for refusal in caught.value.refusals] == ["HEAD_DIM", "DTYPE"]


def test_two_owners_of_one_name_are_an_error_before_import_and_a_preference_decides(
    site: Path, fake_dist: Write
) -> None:
    """[vllm#52802: the last one won, silently]"""
    fake_dist("one", name="flash", prelude='raise SystemExit("imported")')
    fake_dist("two", name="flash", version="2.0")
    with pytest.raises(DuplicatePluginError, match=r"one 1\.0 and two 2\.0.*--plugins-deny.*--plugin-prefer"):
        select(scan(site), "attention", name="flash", query=QUERY)
    chosen = select(scan(site, prefer={"attention/flash": "two"}), "attention", name="flash", query=QUERY)
    assert chosen.distribution == "two"
    assert select(scan(site), "attention", name="two:flash", query=QUERY).distribution == "two"
    assert select(scan(site, deny=("one",)), "attention", name="flash", query=QUERY).distribution == "two"


def test_contract_range_is_checked_before_import(site: Path, fake_dist: Write) -> None:
    fake_dist(contract=">=2,<3", prelude='raise SystemExit("imported")')
    catalog = scan(site)
    assert catalog.entries[0].state is State.INCOMPATIBLE
    with pytest.raises(IncompatiblePluginError, match=r">=2,<3; this core speaks 1\.\d"):
        select(catalog, "attention", name="acme_flash", query=QUERY)


def test_native_part_for_another_torch_is_refused_before_import(site: Path, fake_dist: Write) -> None:
    fake_dist(extra='[provides.native]\ntorch = ">=99"\n')
    with pytest.raises(IncompatiblePluginError, match="built for torch >=99"):
        select(scan(site), "attention", name="acme_flash", query=QUERY)


@pytest.mark.parametrize("option", ["allow", "deny"])
def test_policy_entry_that_matches_nothing_is_an_error_with_a_suggestion(
    site: Path, fake_dist: Write, option: str
) -> None:
    """[vllm#43987: a typo in the allow list loaded nothing and said nothing]"""
    fake_dist()
    with pytest.raises(PluginPolicyError, match=f"--plugins-{option} 'acme_flsh' matches no.*did you mean acme_flash"):
        scan(site, **{option: (" acme_flsh ",)})


@pytest.mark.parametrize("entry", [" acme_flash ", "attention/acme-flash", "ACME", "acme*", "attention/*"])
def test_policy_entries_are_trimmed_and_match_names_kinds_owners_and_globs(
    site: Path, fake_dist: Write, entry: str
) -> None:
    fake_dist()
    with pytest.raises(PluginPolicyError, match="denied by --plugins-deny"):
        select(scan(site, deny=(entry,)), "attention", name="acme_flash", query=QUERY)


def test_deny_wins_over_allow_and_safe_mode_hides_outsiders(site: Path, fake_dist: Write) -> None:
    fake_dist()
    fake_dist("house", name="house", bundled=True)
    assert scan(site, allow=("acme",), deny=("acme",)).find("attention", "acme_flash").state is State.DENIED
    names = scan(site, mode="bundled").names("attention")
    assert names == ("house",)


def test_auto_ranks_by_preference_then_priority_and_caps_outsiders(site: Path, fake_dist: Write) -> None:
    fake_dist("loud", name="loud", priority=99)
    fake_dist("house", name="house", priority=50, bundled=True)
    fake_dist("spare", name="spare", priority=60, bundled=True)
    catalog = scan(site, auto="any")
    assert catalog.names("attention") == ("spare", "house", "loud")
    assert select(catalog, "attention", name=None, query=QUERY).name == "spare"
    assert select(catalog, "attention", name=None, query=QUERY, preferences=("house",)).name == "house"


def test_auto_takes_no_outsider_unless_allowed(site: Path, fake_dist: Write) -> None:
    fake_dist()
    with pytest.raises(PluginRefusedError, match="auto takes bundled plugins only"):
        select(scan(site), "attention", name=None, query=QUERY)


def test_distribution_without_manifest_is_usable_by_name_only(site: Path, fake_dist: Write) -> None:
    fake_dist(manifest="", bundled=True)
    catalog = scan(site, auto="any")
    assert catalog.entries[0].state is State.UNDECLARED
    assert select(catalog, "attention", name="acme_flash", query=QUERY).name == "acme_flash"
    with pytest.raises(PluginRefusedError, match="no manifest"):
        select(catalog, "attention", name=None, query=QUERY)


def test_claims_rule_out_before_import(site: Path, fake_dist: Write) -> None:
    fake_dist(
        "other",
        name="other",
        bundled=True,
        priority=90,
        prelude='raise SystemExit("imported")',
        extra='[provides.claims]\ndevice = ["cuda"]\n',
    )
    fake_dist("house", name="house", bundled=True, priority=50)
    decision = select(scan(site), "attention", name=None, query=QUERY)
    assert decision.name == "house"
    assert decision.rejected[0].reasons == ("manifest: DEVICE: cpu not in ['cuda']",)
    assert any("other" in line and "refused" in line for line in decision.lines())


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ("schema = 1\n[[provides", "no valid TOML"), ("schema = 7", "schema is 7"),
        ('schema = 1\n[[provides]]\nkind = "atention"\nname = "x"\ncontract = "1"', "kind is 'atention'"),
        ('schema = 1\n[[provides]]\nkind = "attention"\nname = "x"\ncontract = "1"\nprio = 1', "unknown keys prio"),
        ('schema = 1\n[[provides]]\nkind = "attention"\nname = "x"\ncontract = "1"\npriority = 100', "priority is 100"),
        ('schema = 1\n[[provides]]\nkind = "attention"\nname = "ghost"\ncontract = ">=1"', "no such entry point"),
    ],
)  # fmt: skip
def test_bad_manifest_is_a_reported_problem_and_stops_nothing(
    site: Path, fake_dist: Write, manifest: str, problem: str
) -> None:
    fake_dist(manifest=manifest)
    fake_dist("fine", name="fine")
    catalog = scan(site)
    assert any(problem in text for text in catalog.problems)
    assert "fine" in catalog.names("attention")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("class Backend: pass", "does not derive from rabbet.contracts.attention.AttentionBackend"),
        ("Backend = 3", "is no class"),
        (
            "from rabbet.contracts.attention import AttentionBackend\nclass Backend(AttentionBackend): pass",
            "lacks the decorator",
        ),
        (
            "from rabbet.contracts import register_attention_backend\nfrom rabbet.contracts.attention import AttentionBackend\n"
            "@register_attention_backend('acme_flash')\nclass Backend(AttentionBackend): pass",
            "lacks build_metadata, forward, kv_layout, supports",
        ),
        ("def Backend(: pass", "SyntaxError"),
    ],
)
def test_class_that_breaks_the_contract_is_refused_with_what_it_lacks(
    site: Path, fake_dist: Write, body: str, problem: str
) -> None:
    fake_dist(body=body)
    with pytest.raises(PluginLoadError, match=problem):
        select(scan(site), "attention", name="acme_flash", query=QUERY)


def test_method_that_lacks_an_argument_of_the_contract_is_refused_at_load(site: Path, fake_dist: Write) -> None:
    """[vllm-metal#493: an added argument crashed old plugins in the middle of a request]"""
    from conftest_text import ATTENTION_WITHOUT_METADATA

    fake_dist(body=ATTENTION_WITHOUT_METADATA)
    with pytest.raises(PluginLoadError, match="has forward.*but the contract calls it as"):
        select(scan(site), "attention", name="acme_flash", query=QUERY)


def test_composition_crosses_processes_and_loads_only_what_it_names(site: Path, fake_dist: Write) -> None:
    fake_dist()
    composition = compose([select(scan(site), "attention", name="acme_flash", query=QUERY)])
    again = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(composition)), Composition)
    assert again == composition
    again.verify()
    assert issubclass(again.load("attention"), AttentionBackend)
    assert again.name("attention") == "acme_flash" and again.get("model") is None
    with pytest.raises(PluginLoadError, match="no model"):
        again.load("model")


def test_worker_that_holds_other_code_refuses_with_a_table(site: Path, fake_dist: Write) -> None:
    package = fake_dist()
    composition = compose([select(scan(site), "attention", name="acme_flash", query=QUERY)])
    from rabbet.registry.composition import source_hash

    (site / package / "helper.py").write_text("x = 1\n")
    source_hash.cache_clear()
    with pytest.raises(CompositionMismatchError, match="attention/acme_flash: decided acme"):
        composition.verify()


def test_digest_changes_with_the_code(site: Path, fake_dist: Write) -> None:
    from rabbet.registry.composition import source_hash

    package = fake_dist()
    decision = select(scan(site), "attention", name="acme_flash", query=QUERY)
    first = compose([decision]).digest
    source = site / package / "__init__.py"
    source.write_text(source.read_text() + "\n# changed\n")
    source_hash.cache_clear()
    assert compose([decision]).digest != first


def test_decorated_class_of_a_script_is_chosen_by_name_only() -> None:
    class Mine(AttentionBackend):
        @classmethod
        def supports(cls, query):  # type: ignore[no-untyped-def]
            return ()

        @classmethod
        def kv_layout(cls, spec):  # type: ignore[no-untyped-def]
            return None

        def build_metadata(self, batch):  # type: ignore[no-untyped-def]
            return None

        def forward(self, layer, q_THD, k_TKD, v_TKE, kv_cache, metadata, out_THE):  # type: ignore[no-untyped-def]
            return None

    register_attention_backend("mine")(Mine)
    assert registrations_of(Mine)[0].name == "mine"
    catalog = Catalog.scan()
    assert select(catalog, "attention", name="mine", query=QUERY).distribution == "(this process)"
    with pytest.raises(DuplicatePluginError, match="registered twice"):
        register_attention_backend("mine")(type("Other", (), {}))


def test_one_file_plugin_is_loaded_by_path(tmp_path: Path) -> None:
    from conftest_text import ONE_FILE

    file = tmp_path / "one.py"
    file.write_text(ONE_FILE)
    catalog = Catalog.scan(PluginPolicy(files=(str(file),)))
    decision = select(catalog, "attention", name="one_file", query=QUERY)
    assert issubclass(compose([decision]).load("attention"), AttentionBackend)
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('oh')")
    with pytest.raises(PluginLoadError, match="broken.py failed to import: RuntimeError: oh"):
        Catalog.scan(PluginPolicy(files=(str(broken),)))


def test_hooks_are_isolated_counted_and_switched_off(site: Path, fake_dist: Write) -> None:
    body = (
        "from rabbet.contracts import register_hooks\nfrom rabbet.contracts.hooks import Hooks, hookimpl\n"
        "@register_hooks('{0}')\nclass Backend(Hooks):\n    @hookimpl\n    def bug_report_sections(self):\n        {1}\n"
    )
    fake_dist("ok", name="ok", group="rabbet.hooks", body=body.format("ok", "return {'a': 'b'}"))
    fake_dist("bad", name="bad", group="rabbet.hooks", body=body.format("bad", "raise ValueError('x')"))
    bus = HookBus.load(scan(site), PluginPolicy())
    for _ in range(5):
        assert bus.call("bug_report_sections") == [{"a": "b"}]
    assert bus.failures == {"bad": 3, "ok": 0}


@pytest.mark.parametrize(
    "raised", ["raise RuntimeError('no licence')", "raise KeyError('no licence')", "raise SystemExit('no licence')"]
)
def test_hooks_that_cannot_be_made_are_left_out_with_one_warning(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture, raised: str
) -> None:
    body = (
        "from rabbet.contracts import register_hooks\nfrom rabbet.contracts.hooks import Hooks, hookimpl\n"
        "@register_hooks('{0}')\nclass Backend(Hooks):\n    def __init__(self):\n        {1}\n"
        "    @hookimpl\n    def bug_report_sections(self):\n        return {{'a': 'b'}}\n"
    )
    fake_dist("ok", name="ok", group="rabbet.hooks", body=body.format("ok", "pass"))
    fake_dist("bad", name="bad", group="rabbet.hooks", body=body.format("bad", raised))
    assert HookBus.load(scan(site), PluginPolicy()).call("bug_report_sections") == [{"a": "b"}]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "hooks/bad of bad 1.0 is left out" in warnings[0] and "no licence" in warnings[0]


def test_hook_that_adds_routes_is_loaded_only_if_allowed_by_name(site: Path, fake_dist: Write) -> None:
    body = (
        "from rabbet.contracts import register_hooks\nfrom rabbet.contracts.hooks import Hooks, hookimpl\n"
        "@register_hooks('web')\nclass Backend(Hooks):\n    @hookimpl\n    def bug_report_sections(self):\n        return {'web': ''}\n"
    )
    fake_dist("web", name="web", group="rabbet.hooks", body=body, extra="adds_routes = true\n")
    assert HookBus.load(scan(site), PluginPolicy()).call("bug_report_sections") == []
    policy = PluginPolicy(allow=("web",))
    assert HookBus.load(scan(site, allow=("web",)), policy).call("bug_report_sections") == [{"web": ""}]


def test_routes_that_the_manifest_hides_do_not_come_past_the_permission(
    site: Path, fake_dist: Write, caplog: pytest.LogCaptureFixture
) -> None:
    body = (
        "from rabbet.contracts import register_hooks\nfrom rabbet.contracts.hooks import Hooks, hookimpl\n"
        "@register_hooks('sly')\nclass Backend(Hooks):\n    @hookimpl\n    def add_http_routes(self, app):\n        return app\n"
    )
    fake_dist("sly", name="sly", group="rabbet.hooks", body=body)
    assert HookBus.load(scan(site), PluginPolicy()).call("add_http_routes", app=1, llm=None) == []
    assert "hooks/sly of sly 1.0 is left out" in caplog.text and "adds_routes" in caplog.text
    policy = PluginPolicy(allow=("sly",))
    assert HookBus.load(scan(site, allow=("sly",)), policy).call("add_http_routes", app=1, llm=None) == [1]


def test_info_explain_and_doctor_tell_what_is_known(
    site: Path, fake_dist: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    fake_dist("bad", name="bad", prelude='raise ImportError("libfoo.so.7 is missing")')
    fake_dist("good", name="good")
    catalog = Catalog.scan()
    assert plugin_info(catalog, "attention/good")[0]["chosen_by"] == "--attention-backend"
    with pytest.raises(UnknownPluginError, match="did you mean good"):
        plugin_info(catalog, "goood")
    assert "good 1.0" in explain(catalog, "attention", QUERY, name="good")[0][0]
    with pytest.raises(UnknownPluginError, match="did you mean attention"):
        explain(catalog, "atention")
    (bad,) = doctor(catalog, "bad")
    (good,) = doctor(catalog, "good")
    assert (bad["ok"], good["ok"]) == (False, True)
    assert "libfoo.so.7 is missing" in bad["detail"] and "ms" in good["detail"]


def test_many_distributions_are_listed_without_importing_any(site: Path, fake_dist: Write) -> None:
    for number in range(60):
        fake_dist(f"d{number}", name=f"n{number}", prelude='raise SystemExit("imported")')
    code = (
        "import sys\nfrom rabbet.registry import Catalog\n"
        f"catalog = Catalog.scan(path=[{str(site)!r}])\n"
        "assert len(catalog.entries) == 60, len(catalog.entries)\n"
        "assert not [m for m in sys.modules if m.startswith('pkg_')] and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_neither_an_author_field_nor_an_own_catalog_makes_a_distribution_one_of_the_projects(site, fake_dist):
    package = fake_dist("impostor", name="impostor", priority=99)
    info = next(site.glob("impostor-*.dist-info"))
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: impostor\nVersion: 1.0\nAuthor: The Rabbet authors\n")
    points = info / "entry_points.txt"
    points.write_text(points.read_text() + f"[rabbet.catalog]\nimpostor = {package}:catalog.toml\n")
    (site / package / "catalog.toml").write_text('schema = 1\n[[distribution]]\nname = "impostor"\nfirst_party = true\nprovides = []\n')
    (entry,) = [item for item in scan(site).entries if item.distribution == "impostor"]
    assert not entry.is_bundled and entry.priority == 49


def test_a_damaged_trusted_catalog_is_told_and_makes_nobody_one_of_the_projects(site, fake_dist, caplog):
    fake_dist("house", name="house", bundled=True)
    (site / "more_first_party" / "catalog.toml").write_text("distribution = 3")
    (entry,) = [item for item in scan(site).entries if item.distribution == "house"]
    assert not entry.is_bundled and "more_first_party:catalog.toml of rabbet-catalog is left out" in caplog.text
