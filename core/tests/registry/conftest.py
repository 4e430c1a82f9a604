"""Makes throw-away distributions: metadata, manifest and package, found like installed ones."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from rabbet_sdk.fakes.dist import write_distribution

sys.path.insert(0, str(Path(__file__).parent))

_numbers = itertools.count()

ATTENTION = """
import sys
from rabbet.contracts import register_attention_backend, Refusal
from rabbet.contracts.attention import AttentionBackend
{prelude}
@register_attention_backend("{name}")
class Backend(AttentionBackend):
    @classmethod
    def supports(cls, query):
        return {refusals}
    @classmethod
    def kv_layout(cls, spec):
        return None
    def build_metadata(self, batch):
        return None
    def forward(self, layer, q_THD, k_TKD, v_TKE, kv_cache, metadata, out_THE):
        return None
"""


def trust(site: Path, dist: str) -> None:
    """Add ``dist`` to a further list of the project's own distributions."""
    info = site / "rabbet_catalog-99.dist-info"
    if not info.is_dir():
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rabbet-catalog\nVersion: 99\n")
        (info / "entry_points.txt").write_text("[rabbet.catalog]\nmore = more_first_party:catalog.toml\n")
        (site / "more_first_party").mkdir()
        (site / "more_first_party" / "catalog.toml").write_text("schema = 1\n")
    file = site / "more_first_party" / "catalog.toml"
    file.write_text(file.read_text() + f'[[distribution]]\nname = "{dist}"\nfirst_party = true\nprovides = []\n')


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on ``sys.path`` for distributions."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    return path


@pytest.fixture
def fake_dist(site: Path) -> Callable[..., str]:
    """Write a distribution; returns the name of its package."""

    def write(
        dist: str = "acme",
        *,
        name: str = "acme_flash",
        version: str = "1.0",
        contract: str = ">=1.0,<2",
        priority: int = 40,
        manifest: str | None = None,
        body: str | None = None,
        prelude: str = "",
        refusals: str = "()",
        extra: str = "",
        group: str = "rabbet.attention",
        bundled: bool = False,
    ) -> str:
        # Other folders execute this file anew, each with its own count: names must not meet in one process.
        package = f"pkg_{dist.replace('-', '_')}_{zlib.crc32(__name__.encode()):x}_{next(_numbers)}"
        if bundled:
            trust(site, dist)
        kind = group.removeprefix("rabbet.")
        text = manifest if manifest is not None else (
            f'schema = 1\n[[provides]]\nkind = "{kind}"\nname = "{name}"\ncontract = "{contract}"\npriority = {priority}\n{extra}'
        )  # fmt: skip
        code = body if body is not None else ATTENTION.format(name=name, refusals=refusals, prelude=prelude)
        return write_distribution(
            site, dist, provides={f"{kind}/{name}": f"{package}:Backend"}, version=version, manifest=text,
            modules={"__init__.py": code}, package=package,
        )  # fmt: skip

    return write


@pytest.fixture(autouse=True)
def forget_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees no class that others registered in this process, and leaves none behind."""
    from rabbet.contracts import registration
    from rabbet.registry import loader, tamper

    for name, empty in (("_originals", {}), ("_patches", {}), ("_owners", {}), ("_asked", set())):
        monkeypatch.setattr(tamper, name, empty)
    monkeypatch.setattr(registration, "_staged", {})
    monkeypatch.setattr(loader, "_results", {})
    assert "pytest" in sys.modules
