"""The suite of poolers on the twin, and its reference by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rabbet_sdk.conformance import Claims, PoolerConformance
from rabbet_sdk.conformance.pooler import _mean
from rabbet_sdk.strict.pooler import StrictPooler

from rabbet.contracts.pooler import PoolerQuery


class TestStrict(PoolerConformance):
    plugin = "pooler/strict"


class Both(StrictPooler):
    """A vector a text, or one a token, as each request wants it."""

    def new_state_for(self, query: PoolerQuery) -> Any:
        return [query.task]

    def update(self, state: Any, hidden_TN: torch.Tensor) -> None:
        state.append(hidden_TN.clone())

    def finish(self, state: Any) -> torch.Tensor:
        rows_TN = torch.cat(state[1:]).float()
        return rows_TN if state[0] == "token_embed" else rows_TN.mean(dim=0)


def test_one_class_may_serve_two_tasks() -> None:
    claims = Claims({"task": ["embed", "token_embed"]})
    subject: Any = SimpleNamespace(plugin_class=Both, claims=claims)
    PoolerConformance().test_tasks_have_their_shape(subject)
    old: Any = SimpleNamespace(plugin_class=StrictPooler, claims=claims)
    with pytest.raises(AssertionError, match="token_embed"):
        PoolerConformance().test_tasks_have_their_shape(old)


def test_mean_by_hand() -> None:
    assert _mean(torch.tensor([[6.0, 0.0], [0.0, 8.0]])).tolist() == torch.tensor([0.6, 0.8]).tolist()
