"""The suite of proposers on the lookup twin and on a head that reads hidden states; the scripted proposer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rabbet_sdk.conformance import ProposerConformance
from rabbet_sdk.fakes.dist import write_distribution
from rabbet_sdk.fakes.proposers import HEAD_VOCABULARY, ScriptedProposer

from rabbet.contracts.proposer import DraftBatch

_MANIFEST = f"""schema = 1

[[provides]]
kind = "proposer"
name = "strict_head"
contract = ">=1.0,<2"
roles = ["worker"]
priority = 10
[provides.claims]
vocab_size = [{HEAD_VOCABULARY}]
features = ["async"]
"""


class TestStrict(ProposerConformance):
    plugin = "proposer/strict"


class TestHead(ProposerConformance):
    plugin = "proposer/strict_head"
    vocab_size = HEAD_VOCABULARY


def _install_head() -> None:
    """Beside the twins, which stand first on the path while tests are collected."""
    site = next(Path(entry) for entry in sys.path if (Path(entry) / "rabbet_strict").is_dir())
    if not (site / "strict_head").exists():
        provides = {"proposer/strict_head": "rabbet_sdk.fakes.proposers:HeadProposer"}
        write_distribution(site, "strict-head", provides=provides, manifest=_MANIFEST)


_install_head()


@pytest.fixture
def scripted() -> Iterator[Any]:
    proposer = ScriptedProposer(SimpleNamespace())  # type: ignore[arg-type]
    yield proposer


def test_scripted_proposer_follows_its_script(scripted: Any) -> None:
    scripted.script, scripted.prompt_lengths = {"a": [5, 6, 7]}, {"a": 2}
    batch = DraftBatch(
        request_ids=["a", "b"], token_ids=[[1, 2, 5], [1]], num_tokens=[3, 1], max_drafts=[4, 4],
        sampled_ids=torch.tensor([[5], [1]]),
    )  # fmt: skip
    assert scripted.propose(batch).token_ids == [[6, 7], []]
    assert scripted.seen == [("a", 3), ("b", 1)]
