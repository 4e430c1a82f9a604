"""Poolers with one fault each, on top of the strict twin."""

from __future__ import annotations

from typing import Any

import torch

from rabbet.contracts import register_pooler
from rabbet_sdk.mutants.base import planter
from rabbet_sdk.strict.pooler import StrictPooler, _Sum

__all__ = ["MUTANTS"]

_plant = planter(globals(), register_pooler, StrictPooler)


def _keep_view(_self: Any, state: Any, hidden_TN: torch.Tensor) -> None:
    state.append(hidden_TN)


def _finish_views(self: Any, state: Any) -> torch.Tensor:
    whole = _Sum()
    StrictPooler.update(self, whole, torch.cat(state))
    return StrictPooler.finish(self, whole)


def _sum_in_dtype(_self: Any, state: Any, hidden_TN: torch.Tensor) -> None:
    for row in hidden_TN:
        state.total_N = row if state.total_N is None else state.total_N + row
    state.count += hidden_TN.shape[0]


def _mean_of_chunks(_self: Any, state: Any, hidden_TN: torch.Tensor) -> None:
    mean_N = hidden_TN.double().mean(dim=0)
    state.total_N = mean_N if state.total_N is None else state.total_N + mean_N
    state.count += 1


def _one_state(self: Any) -> Any:
    return vars(self).setdefault("state", _Sum())


def _finish_reset(self: Any, state: Any) -> torch.Tensor:
    result = StrictPooler.finish(self, state)
    state.total_N, state.count = None, 0
    return result


_results: dict[int, torch.Tensor] = {}


def _reuse_result(self: Any, state: Any) -> torch.Tensor:
    result = StrictPooler.finish(self, state)
    return _results.setdefault(result.shape[0], torch.empty_like(result)).copy_(result)


def _in_place(self: Any, state: Any, hidden_TN: torch.Tensor) -> None:
    kept = hidden_TN.clone()
    hidden_TN.div_(hidden_TN.norm(dim=-1, keepdim=True))
    StrictPooler.update(self, state, kept)


_waiting: list[Any] = []


def _shared_sum(self: Any, state: Any, hidden_TN: torch.Tensor) -> None:
    other = next((one for one in _waiting if one[0] is not self), None)
    StrictPooler.update(self, other[1] if other else state, hidden_TN)
    _waiting[:] = [(self, state)]


MUTANTS = (
    _plant(
        "keeps_views", "nothing_points_into_the_engines_memory", "Keeps views of buffers that are overwritten.",
        new_state=lambda _self: [], update=_keep_view, finish=_finish_views,
    ),
    _plant("sums_in_dtype", "result_is_what_is_promised", "Long bfloat16 prompts lose tokens.", update=_sum_in_dtype),
    _plant("mean_of_chunks", "chunks_change_nothing", "Short last chunks weigh too much.", update=_mean_of_chunks),
    _plant(
        "one_state", "prompts_in_turns_are_kept_apart", "State in the pooler instead of the request.",
        new_state=_one_state, finish=_finish_reset,
    ),
    _plant("one_result", "prompts_in_turns_are_kept_apart", "All results in one buffer.", finish=_reuse_result),
    _plant("in_place", "hidden_states_stay_as_they_are", "Normalises the engine's hidden states.", update=_in_place),
    _plant("last_state", "two_poolers_share_no_state", "A module's global between engines.", update=_shared_sum),
    _plant("claims_classify", "supports_is_honest", "Claims too much.", claims='task = ["embed", "classify"]'),
    _plant(
        "both_shapes", "tasks_have_their_shape", "Claims a vector a text and one a token.",
        claims='task = ["embed", "token_embed"]',
        supports=classmethod(lambda _cls, query: StrictPooler.supports(query) if "embed" not in query.task else ()),
    ),
)  # fmt: skip
"""The zoo of poolers."""
