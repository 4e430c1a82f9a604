"""``rabbet-sdk migrate``: what core's shipped signatures say has changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rabbet_sdk.fakes.dist import write_distribution
from rabbet_sdk.migrate import known_versions, migrate, migration_page

from rabbet.contracts import KINDS
from rabbet.errors import PluginError


@pytest.mark.parametrize("kind", KINDS)
def test_every_contract_ships_its_signatures(kind: str) -> None:
    known = known_versions(kind)
    assert list(known)[-1] == KINDS[kind].version
    assert set(KINDS[kind].previous) <= set(known), "a version that is still served has to be comparable"


def test_a_plugin_is_told_what_changed_since_the_version_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = (
        'schema = 1\n[[provides]]\nkind = "logits_processor"\nname = "old"\ncontract = ">=1.0,<2"\n'
        '[[provides]]\nkind = "grammar"\nname = "new"\ncontract = ">=1.0,<2"\n'
    )
    write_distribution(
        tmp_path, "acme-old", provides={"logits_processor/old": "acme_old:X", "grammar/new": "acme_old:Y"}, manifest=manifest
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = {row["kind"]: row for row in migrate("acme_old")}
    assert (rows["logits_processor"]["from"], rows["logits_processor"]["to"]) == ("1.0", "2.0")
    assert [item["level"] for item in rows["logits_processor"]["changes"]] == ["minor", "major"]
    assert not rows["grammar"]["changes"]
    page = migration_page(rows["logits_processor"])
    assert "`LogitsProcessor.apply` was (self, logits_BV" in page and 'contract = ">=2.0,<3"' in page
    with pytest.raises(PluginError, match=r"--to 7.0: known versions of grammar are 1.0"):
        migrate("grammar/new", until="7.0")
    with pytest.raises(PluginError, match="did you mean grammar/new"):
        migrate("grammar/nwe")


def test_the_command_prints_json_and_writes_pages(tmp_path: Path) -> None:
    words = ["migrate", "weights", "--from", "1.0", "--page", str(tmp_path), "--json"]
    done = subprocess.run([sys.executable, "-m", "rabbet_sdk", *words], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert rows[0]["changes"][0] == {"level": "minor", "change": "WeightFormat.peek is new"}
    assert (tmp_path / f"weights-{rows[0]['to']}.md").read_text().startswith("# weights: from 1.0 to ")
