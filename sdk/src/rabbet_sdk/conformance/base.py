"""What every plugin is tested for, whatever its kind, and the machinery that suites share.

A suite is a class that an author subclasses in a test file; plain pytest runs it::

    from rabbet_sdk.conformance import AttentionConformance

    class TestAcmeFlash(AttentionConformance):
        plugin = "attention/acme_flash"
        device = "cuda"

The plugin is found through its entry point. Cases come from the manifest's claims: a claimed case that is refused
fails, and so does an unclaimed one that is accepted. A subclass may set what ``knobs`` names and add tests; it may not
delete, override or skip a test of the suite.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import pytest

from rabbet.contracts.kinds import KINDS
from rabbet.contracts.registration import registrations_of
from rabbet.contracts.support import Refusal
from rabbet.registry.manifest import parse_manifest
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import ExpectedFailure, unavailable, unclaimed
from rabbet_sdk.conformance.subject import ImportFacts, Subject, find_entry, import_facts, load_subject

__all__ = ["PluginConformance", "SupportsConformance", "suite_of"]


@cache
def _claims_of(cls: Any) -> Claims:
    provided = find_entry(cls.plugin).provided
    return Claims(provided.claims if provided else {})


def suite_of(cls: type) -> type:
    """The suite that a test class derives from: the nearest class of ``rabbet_sdk.conformance`` above it."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("rabbet_sdk.conformance"))


class _ClaimedDevice:
    """The first device that the manifest claims; a subclass may set another one in its place."""

    def __get__(self, suite: PluginConformance | None, cls: type[PluginConformance]) -> str:
        return str(next(iter(cls.claims().values("device")), "cpu")) if cls.plugin else "cpu"


class PluginConformance:
    """The tests of every kind. Subclass the suite of a kind, not this one.

    Attributes:
        plugin: ``kind/name`` (or ``kind/distribution:name``) of the plugin.
        device: Device that tests compute on; left out, the first of the claims, or else the CPU.
        options: Options that the plugin is built with.
        expected_failures: ``test_name[case]`` or ``test_name``, without ``test_``, to ``xfail(reason, until=...)``.
        knobs: Attributes that a subclass may set.
    """

    kind: ClassVar[str] = ""
    plugin: ClassVar[str] = ""
    device: ClassVar[str] = _ClaimedDevice()  # type: ignore[assignment]
    options: ClassVar[Mapping[str, Any]] = {}
    expected_failures: ClassVar[Mapping[str, ExpectedFailure]] = {}
    knobs: ClassVar[frozenset[str]] = frozenset({"plugin", "device", "options", "expected_failures"})

    @classmethod
    def claims(cls) -> Claims:
        """The manifest's claims; read without importing the plugin, and once a class: every test and case asks for them."""
        return _claims_of(cls)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Turn ``@cases`` into parameters."""
        marked = getattr(metafunc.function, "__rabbet_cases__", None)
        if marked is None or metafunc.cls is None:
            return
        source, every = marked
        found: list[Case] = list(getattr(metafunc.cls, source)(metafunc.cls.claims()))
        metafunc.parametrize("case", [(item, every) for item in found], ids=[item.id for item in found], indirect=True)

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest) -> Case:
        """The case; an unclaimed one ends the test, unless the test wants every case."""
        item, every = request.param
        if item.unclaimed and not every:
            unclaimed(item.unclaimed)
        assert isinstance(item, Case)
        return item

    @pytest.fixture
    def subject(self) -> Subject:
        """The plugin, imported."""
        return load_subject(self.plugin)

    @pytest.fixture
    def facts(self) -> ImportFacts:
        """What its import does in a fresh process."""
        return import_facts(self.plugin)

    @pytest.fixture
    def generator(self, request: pytest.FixtureRequest) -> Any:
        """A seeded ``torch.Generator`` on the CPU; other numbers in each test, the same in each run with one seed."""
        import zlib

        import torch

        seed = request.config.getoption("rabbet_seed") + zlib.crc32(request.node.name.encode())
        return torch.Generator().manual_seed(seed)

    @pytest.fixture
    def torch_device(self) -> Any:
        """The device to compute on, as ``torch.device``; the host where Triton's interpreter stands in for a GPU."""
        import torch

        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            if os.environ.get("TRITON_INTERPRET") == "1":
                return torch.device("cpu")
            unavailable("no CUDA device on this machine")
        return device

    def test_suite_is_whole(self, request: pytest.FixtureRequest) -> None:
        """No standard test is deleted, overridden or skipped, and each expected failure names a test."""
        cls = type(self)
        suite = suite_of(cls)
        own = [base for base in cls.__mro__ if base not in suite.__mro__]
        bent = sorted(name for base in own for name in vars(base) if hasattr(suite, name) and not _may_set(suite, name))
        assert not bent, f"{cls.__name__} replaces parts of {suite.__name__}: {', '.join(bent)}"
        marked = sorted(
            {
                f"{item.name}: {mark.name}"
                for item in request.session.items
                if getattr(item, "cls", None) is cls
                for mark in item.iter_markers()
                if mark.name in ("skip", "skipif", "xfail")
            }
        )
        assert not marked, f"standard tests may not be skipped ({'; '.join(marked)}); use expected_failures"
        tests = {name.removeprefix("test_") for name in dir(cls) if name.startswith("test_")}
        unknown = sorted(key for key in cls.expected_failures if key.partition("[")[0] not in tests)
        assert not unknown, f"expected_failures names no test of the suite: {', '.join(unknown)}"

    def test_manifest_says_what_the_distribution_holds(self, subject: Subject) -> None:
        """The manifest parses, and its table, the entry point and the decorator agree."""
        entry = subject.entry
        assert entry.kind == self.kind, f"{self.plugin} is of the kind {entry.kind}; this suite is for {self.kind}"
        distribution = entry.entry_point.dist if entry.entry_point is not None else None
        assert distribution is not None, "the plugin has no entry point"
        points = [p for p in distribution.entry_points if p.group == "rabbet.manifest"]
        assert len(points) == 1, f"{entry.distribution} needs exactly one entry point in rabbet.manifest"
        from importlib.resources import files

        package, _, file = points[0].value.partition(":")
        manifest = parse_manifest((files(package) / file).read_text(encoding="utf-8"))
        assert not manifest.problems, f"manifest of {entry.distribution}: {'; '.join(manifest.problems)}"
        have = {
            (kind, name)
            for kind in KINDS
            for point in distribution.entry_points
            if point.group == KINDS[kind].group
            for name in [point.name if KINDS[kind].verbatim else point.name.casefold().replace("-", "_")]
        }
        declared = {(item.kind, item.name) for item in manifest.provides}
        assert have == declared, f"entry points and manifest differ: {sorted(have ^ declared)}"
        assert any(
            (record.kind, record.name) == (entry.kind, entry.name) for record in registrations_of(subject.plugin_class)
        ), f"the class is not registered as {entry.kind}/{entry.name}: its decorator names something else"

    def test_contract_range_is_bounded(self, subject: Subject) -> None:
        """The range names a lowest version and ends before the next major, so that a new core refuses in time."""
        from packaging.specifiers import SpecifierSet

        assert subject.entry.provided is not None
        declared = SpecifierSet(subject.entry.provided.contract)
        major = int(KINDS[self.kind].version.split(".")[0])
        assert f"{major + 1}.0" not in declared, f"contract {declared} also holds for {major + 1}.0, which is unknown"

    def test_import_is_quiet(self, facts: ImportFacts) -> None:
        """The import works, leaves no thread, makes no CUDA context; a front-end plugin imports no torch."""
        assert not facts.error, f"the import failed: {facts.error}"
        assert not facts.threads, f"the import left threads running: {', '.join(facts.threads)}"
        assert not facts.has_cuda, "the import made a CUDA context; make it when the plugin is built"
        if facts.roles == ("front",):
            heavy = sorted({name.partition(".")[0] for name in facts.modules} & {"torch", "triton"})
            assert not heavy, f"a plugin of the front end imports {', '.join(heavy)}"

    def test_import_changes_nothing_of_core(self, facts: ImportFacts) -> None:
        """No callable of ``rabbet`` is another one after the import."""
        assert not facts.patched, f"the import patches core: {', '.join(facts.patched)}"

    def test_import_reaches_no_private_part_of_core(self, facts: ImportFacts) -> None:
        """What is not public changes without notice (``rabbet_sdk.strict.host`` is the host that offers nothing else)."""
        assert not facts.outside, "; ".join(facts.outside)

    def test_operators_stand_in_the_own_namespace(self, facts: ImportFacts, subject: Subject) -> None:
        """torch operators are registered under the distribution's import name."""
        package = subject.entry.value.partition(":")[0].partition(".")[0]
        foreign = [op for op in facts.ops if op.partition("::")[0] != package and op.split("::")[0] not in _TORCH_OWN]
        assert not foreign, f"operators outside of the namespace {package!r}: {', '.join(foreign)}"

    def test_options_are_checked(self, subject: Subject) -> None:
        """A schema of options refuses keys that it does not know."""
        provided, point = subject.entry.provided, subject.entry.entry_point
        if provided is None or provided.options is None or point is None:
            return
        from importlib.resources import files

        package = subject.entry.value.partition(":")[0].partition(".")[0]
        schema = json.loads((files(package) / provided.options).read_text(encoding="utf-8"))
        assert schema.get("type") == "object", "the schema of options must be of the type object"
        assert schema.get("additionalProperties") is False, "the schema must say additionalProperties: false"
        assert set(self.options) <= set(schema.get("properties", {})), "the suite's options are not in the schema"


_TORCH_OWN = frozenset({"aten", "prims", "prim", "inductor", "profiler", "torch", "quantized", "mkldnn", "c10d"})


def _may_set(suite: type, name: str) -> bool:
    allowed: frozenset[str] = getattr(suite, "knobs", frozenset())
    return name in allowed or (name.startswith("__") and name.endswith("__")) or name == "pytestmark"


class SupportsConformance(PluginConformance):
    """The tests of every kind whose plugins answer ``supports(query)``.

    Attributes:
        machine_codes: Codes of refusals that are this machine's fault, not the plugin's: what it claims is "unavailable".
    """

    machine_codes: ClassVar[frozenset[str]] = frozenset({"MISSING_LIBRARY", "ABSENT", "NO_DEVICE"})

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Queries over the contract's axes, each marked by the claims; a suite gives them."""
        raise NotImplementedError

    @cases("query_cases", every=True)
    def test_supports_is_honest(self, subject: Subject, case: Case) -> None:
        """A claimed query is accepted, an unclaimed one is refused with a reason."""
        refusals = subject.plugin_class.supports(case.value)
        if case.unclaimed:
            assert refusals, f"accepted, though the manifest does not claim it: {case.unclaimed}"
        elif any(item.code in self.machine_codes for item in refusals):
            unavailable("; ".join(str(item) for item in refusals))
        else:
            assert not refusals, f"claimed, but refused: {'; '.join(str(item) for item in refusals)}"

    @cases("query_cases", every=True)
    def test_supports_is_total_and_pure(self, subject: Subject, case: Case) -> None:
        """It never raises, answers the same again, and gives a tuple of refusals with code and message."""
        first = subject.plugin_class.supports(case.value)
        assert isinstance(first, tuple), f"supports gave {type(first).__name__}; the contract asks for a tuple"
        assert first == subject.plugin_class.supports(case.value), "supports answers differently the second time"
        for item in first:
            assert isinstance(item, Refusal), f"supports gave {item!r}; the contract asks for Refusal"
            assert item.code and item.code == item.code.upper() and " " not in item.code, f"code {item.code!r}"
            assert item.message.strip(), f"the refusal {item.code} has no message"
