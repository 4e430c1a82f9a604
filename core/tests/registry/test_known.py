"""Errors of unknown names say what to install, where a catalog knows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rabbet.errors import UnknownPluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.known import install_hint

GOOD = """
schema = 1
[[distribution]]
name = "acme-quant"
[[distribution.provides]]
kind = "quantization"
name = "acme4"
aliases = ["Acme-Int4"]
contract = ">=1.0,<2"
[[distribution]]
name = "acme-next"
[[distribution.provides]]
kind = "quantization"
name = "acme8"
contract = ">=7"
"""


def offer(site: Path, text: str, name: str = "acme-catalog") -> None:
    package = name.replace("-", "_") + "_data"
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rabbet.catalog]\n{name} = {package}:catalog.toml\n")
    (site / package).mkdir()
    (site / package / "__init__.py").write_text('raise SystemExit("imported")')
    (site / package / "catalog.toml").write_text(text)


@pytest.mark.parametrize("name", ["acme4", "acme_int4"])
def test_unknown_name_says_what_to_install(site: Path, name: str) -> None:
    offer(site, GOOD)
    with pytest.raises(UnknownPluginError, match=f"needs quantization '{name}': pip install acme-quant"):
        Catalog.scan().find("quantization", name)


def test_range_that_does_not_fit_is_said(site: Path) -> None:
    offer(site, GOOD)
    hint = install_hint("quantization", "acme8", [str(site)])
    assert hint.startswith("pip install acme-next (") and ">=7" in hint


def test_other_kind_and_unlisted_name_have_no_hint(site: Path) -> None:
    offer(site, GOOD)
    assert install_hint("attention", "acme4", [str(site)]) == ""
    with pytest.raises(UnknownPluginError, match="install the distribution that provides it"):
        Catalog.scan().find("quantization", "nobodys")


@pytest.mark.parametrize(
    "text", ["schema = 2", "schema", "schema = 1", "schema = 1\ndistribution = 3", 'schema = 1\n[[distribution]]\nname = "x"\nprovides = [1]', GOOD.replace('["Acme-Int4"]', '3'), GOOD.replace('">=7"', '7')]
)
def test_damaged_catalog_is_left_out(site: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    offer(site, text, "broken-catalog")
    offer(site, GOOD)
    with caplog.at_level(logging.WARNING):
        assert install_hint("quantization", "acme4", [str(site)]) == "pip install acme-quant"
    assert "broken-catalog is left out" in caplog.text
