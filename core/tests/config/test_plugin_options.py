"""Options of plugins are checked against the schema of their manifest, without importing them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rabbet._util.json_schema import problems
from rabbet.config.plugin_options import check_plugin_options
from rabbet.errors import ConfigError, PluginLoadError
from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import Entry, State
from rabbet.registry.manifest import Provided

SCHEMA = {
    "type": "object",
    "properties": {
        "depth": {"type": "integer", "minimum": 1, "maximum": 8},
        "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "mode": {"enum": ["fast", "small"]},
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "inner": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
        "free": {"type": "object"},
        "maybe": {"type": ["integer", "null"]},
        "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        "fixed": {"const": 3},
    },
}


@pytest.mark.parametrize(
    "value",
    [
        {}, {"depth": 1}, {"depth": 8.0}, {"share": 0.5}, {"mode": "fast"}, {"name": "abc"}, {"sizes": [1, 2]},
        {"inner": {"on": True}}, {"free": {"x": [1]}}, {"maybe": None}, {"maybe": 3}, {"table": {"a": 1}}, {"fixed": 3},
    ],
)  # fmt: skip
def test_values_that_fit(value: dict[str, Any]) -> None:
    assert list(problems(value, SCHEMA)) == []


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        ({"depth": 0}, "depth", "at least 1"), ({"depth": 9}, "depth", "at most 8"), ({"depth": 1.5}, "depth", "type integer"),
        ({"depth": True}, "depth", "type integer"), ({"depth": "1"}, "depth", "type integer"), ({"share": 0}, "share", "more than 0"),
        ({"share": 1}, "share", "less than 1"), ({"share": float("nan")}, "share", "more than 0"), ({"mode": "slow"}, "mode", "'fast' or 'small'"),
        ({"name": "A1"}, "name", "must match"), ({"sizes": [1, "x"]}, "sizes[1]", "type integer"), ({"inner": {}}, "inner", "lacks 'on'"),
        ({"inner": {"on": True, "of": 1}}, "inner.of", "is no option"), ({"dpth": 1}, "dpth", "is no option"),
        ({"maybe": "x"}, "maybe", "integer or null"), ({"table": {"a": "x"}}, "table.a", "type integer"), ([], "", "type object"),
        ({"fixed": 4}, "fixed", "must be 3"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(value: Any, path: str, text: str) -> None:
    found = next(problems(value, SCHEMA))
    assert found[0] == path and text in found[1]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plugin's package that must not be imported."""
    folder = tmp_path / "acme_options_plugin"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "options.json").write_text(json.dumps(SCHEMA))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    assert "acme_options_plugin" not in sys.modules


def entry(name: str, *, options: str | None, kind: str = "attention", state: State = State.COMPATIBLE) -> Entry:
    provided = Provided(kind=kind, name=name, contract=">=1", options=options)
    value = "acme_options_plugin.part:Class"
    return Entry(kind=kind, name=name, distribution="acme", version="1", value=value, provided=provided, state=state)


def test_options_are_checked_by_the_schema_beside_the_manifest(package: Path) -> None:
    catalog = Catalog((entry("acme", options="options.json"),))
    check_plugin_options({"acme": {"depth": 3, "mode": "fast"}, "ACME": {}}, catalog)
    for options, message in (
        ({"dpth": 3}, r"--plugin-config.acme.dpth is no option; did you mean depth\?"),
        ({"depth": 0}, "--plugin-config.acme.depth must be at least 1"),
        ({"inner": {}}, "--plugin-config.acme.inner lacks 'on'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_plugin_options({"acme": options}, catalog)


def test_a_name_may_be_spelt_as_everywhere_and_its_options_reach_the_plugin(package: Path) -> None:
    catalog = Catalog((entry("acme_x", options=None), entry("AcmeForCausalLM", options=None, kind="model")))
    given = {"Acme-X": {"a": 1}, "acme_x": {"b": 2}, "AcmeForCausalLM": {"c": 3}}
    assert check_plugin_options(given, catalog) == {"acme_x": {"a": 1, "b": 2}, "AcmeForCausalLM": {"c": 3}}
    with pytest.raises(ConfigError, match="did you mean AcmeForCausalLM"):
        check_plugin_options({"acmeforcausallm": {}}, catalog)


def test_a_plugin_that_has_no_options_says_so(package: Path) -> None:
    (package / "none.json").write_text('{"properties": {}}')
    with pytest.raises(ConfigError, match="--plugin-config.acme.depth is no option; it has none$"):
        check_plugin_options({"acme": {"depth": 3}}, Catalog((entry("acme", options="none.json"),)))


def test_options_of_a_plugin_without_a_schema_are_free(package: Path) -> None:
    check_plugin_options({"acme": {"anything": [1]}}, Catalog((entry("acme", options=None),)))


def test_options_for_a_plugin_that_is_not_there_are_refused(package: Path) -> None:
    catalog = Catalog((entry("acme", options=None), entry("gone", options=None, state=State.DENIED)))
    with pytest.raises(ConfigError, match=r"no plugin of that name is installed and allowed; did you mean acme\?"):
        check_plugin_options({"acne": {"a": 1}}, catalog)
    with pytest.raises(ConfigError, match="installed and allowed"):
        check_plugin_options({"gone": {}}, catalog)


def test_one_of_several_contributions_of_a_name_has_to_accept(package: Path) -> None:
    (package / "other.json").write_text('{"properties": {"rate": {"type": "integer"}}}')
    catalog = Catalog((entry("acme", options="options.json"), entry("acme", options="other.json", kind="linear")))
    check_plugin_options({"acme": {"rate": 3}}, catalog)
    check_plugin_options({"acme": {"depth": 3}}, catalog)
    with pytest.raises(ConfigError, match="is no option"):
        check_plugin_options({"acme": {"rate": 3, "depth": 3}}, catalog)


@pytest.mark.parametrize("text", ["{", None])
def test_a_schema_that_cannot_be_read_is_the_plugins_fault(package: Path, text: str | None) -> None:
    path = package / "bad.json"
    path.write_text(text) if text else path.unlink(missing_ok=True)
    with pytest.raises(PluginLoadError, match="acme 1 names bad.json"):
        check_plugin_options({"acme": {}}, Catalog((entry("acme", options="bad.json"),)))
