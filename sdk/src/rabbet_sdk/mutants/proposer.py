"""Proposers with one fault each, on top of the strict twin (lookup) and of the toy head."""

# ruff: noqa: ARG001, ARG005 - faults stand in for methods, whose arguments they do not all need

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from rabbet.contracts import register_proposer
from rabbet.contracts.proposer import DraftBatch, DraftResult
from rabbet_sdk.fakes.proposers import HEAD_VOCABULARY, HeadProposer
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.proposer import StrictProposer

__all__ = ["MUTANTS"]

_HEAD_CLAIMS = f'vocab_size = [{HEAD_VOCABULARY}]\nfeatures = ["async"]'


def _plant(
    name: str, caught_by: str, story: str, *, head: bool = False, claims: str | None = None, **parts: Any
) -> Mutant:
    """Register a class with ``parts`` in place of the twin's (or the head's), as an attribute of this module."""
    title = name.title().replace("_", "")
    base = HeadProposer if head else StrictProposer
    cls = type(title, (base,), {"__module__": __name__, "__doc__": story, **parts})
    globals()[title] = register_proposer(name)(cls)
    if claims is None and head:
        claims = _HEAD_CLAIMS
    return Mutant(name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story, claims=claims)


def _lists(self: Any, batch: DraftBatch) -> list[list[int]]:
    found = StrictProposer.propose(self, batch).token_ids
    assert found is not None
    return found


def _one_too_many(self: Any, tokens: Any, most: int) -> list[int]:
    return StrictProposer.look_up(self, tokens, most + 1 if most else 0)


def _idle_rows_too(self: Any, tokens: Any, most: int) -> list[int]:
    return StrictProposer.look_up(self, tokens, max(most, 1))


def _past_vocabulary(self: Any, tokens: Any, most: int) -> list[int]:
    size = self.context.query.vocab_size
    return [size if token == 6 else token for token in StrictProposer.look_up(self, tokens, most)]


def _first_number(self: Any, tokens: Any, most: int) -> list[int]:
    self.__dict__.setdefault("first", most)
    return StrictProposer.look_up(self, tokens, min(most, self.first))


def _remembers(self: Any, batch: DraftBatch) -> DraftResult:
    memory = self.__dict__.setdefault("memory", {})
    drafts = [memory.setdefault(n, ids) for n, ids in zip(batch.request_ids, _lists(self, batch), strict=True)]
    return DraftResult(token_ids=drafts)


def _by_row(self: Any, batch: DraftBatch) -> DraftResult:
    memory = self.__dict__.setdefault("memory", {})
    drafts = [memory.setdefault(row, ids)[: batch.max_drafts[row]] for row, ids in enumerate(_lists(self, batch))]
    return DraftResult(token_ids=drafts)


_everyone: dict[str, list[int]] = {}


def _shared(self: Any, batch: DraftBatch) -> DraftResult:
    drafts = [_everyone.setdefault(n, ids) for n, ids in zip(batch.request_ids, _lists(self, batch), strict=True)]
    return DraftResult(token_ids=drafts)


def _own_history(self: Any, batch: DraftBatch) -> DraftResult:
    memory = self.__dict__.setdefault("memory", {})
    assert batch.token_ids is not None
    texts = [[*memory.get(n, ()), *t] for n, t in zip(batch.request_ids, batch.token_ids, strict=True)]
    drafts = _lists(self, replace(batch, token_ids=texts, num_tokens=[len(text) for text in texts]))
    # What it proposed counts as text, whether or not the target took it.
    memory.update({n: [*t, *d] for n, t, d in zip(batch.request_ids, batch.token_ids, drafts, strict=True)})
    return DraftResult(token_ids=drafts)


def _neighbours(self: Any, batch: DraftBatch) -> DraftResult:
    drafts = _lists(self, batch)
    longest = max(drafts, key=len, default=[])
    return DraftResult(token_ids=[d or longest[:m] for d, m in zip(drafts, batch.max_drafts, strict=True)])


def _appends(self: Any, batch: DraftBatch) -> DraftResult:
    drafts = _lists(self, batch)
    for tokens, ids in zip(batch.token_ids or (), drafts, strict=True):
        tokens.extend(ids)  # type: ignore[attr-defined]
    return DraftResult(token_ids=drafts)


def _dice(self: Any, tokens: Any, most: int) -> list[int]:
    return [random.randrange(self.context.query.vocab_size) for _ in range(most)]


def _needs_rows(self: Any, batch: DraftBatch) -> DraftResult:
    max(batch.num_tokens)
    return DraftResult(token_ids=_lists(self, batch))


def _cold(self: Any, batch: DraftBatch) -> DraftResult:
    found = HeadProposer.propose(self, batch)
    assert found.probabilities is not None
    return replace(found, probabilities=found.probabilities**2 / (found.probabilities**2).sum(-1, True).clamp(min=1e-9))


def _shifted(self: Any, batch: DraftBatch) -> DraftResult:
    found = HeadProposer.propose(self, batch)
    assert found.probabilities is not None
    return replace(found, probabilities=found.probabilities.roll(1, dims=1))


def _unnormalised(self: Any, batch: DraftBatch) -> DraftResult:
    found = HeadProposer.propose(self, batch)
    assert found.probabilities is not None
    return replace(found, probabilities=found.probabilities * 0.9)


MUTANTS = (
    _plant("one_draft_too_many", "no_more_drafts_than_wanted", "k + 1 drafts overrun the slots.", look_up=_one_too_many),
    _plant("drafts_for_idle_rows", "no_more_drafts_than_wanted", "Ignores max_drafts of 0.", look_up=_idle_rows_too),
    _plant("past_vocabulary", "drafts_are_in_the_vocabulary", "sglang#23838: an id V.", look_up=_past_vocabulary),
    _plant("first_k_for_ever", "number_of_drafts_may_change", "Keeps the first step's k.", look_up=_first_number),
    _plant("remembers_finished", "a_finished_request_leaves_nothing", "Never forgets an id.", propose=_remembers),
    _plant("stale_after_preemption", "a_preempted_request_comes_back", "Drafts from before.", propose=_remembers),
    _plant("state_by_row", "rows_may_change_places", "State hangs on the row, not on the request.", propose=_by_row),
    _plant("class_state", "two_instances_share_no_state", "A module-level table of requests.", propose=_shared),
    _plant("rejected_are_text", "rejected_drafts_leave_nothing", "Drafts stay after rejection.", propose=_own_history),
    _plant("reads_neighbours", "a_row_depends_on_its_request_alone", "Another row's text leaks.", propose=_neighbours),
    _plant("appends_to_batch", "inputs_stay_as_they_are", "Writes drafts into the batch's lists.", propose=_appends),
    _plant("own_dice", "all_ranks_propose_the_same", "Draws from the process's random numbers.", look_up=_dice),
    _plant("needs_a_row", "an_empty_batch_is_no_fault", "max() of an empty batch.", propose=_needs_rows),
    _plant("claims_async", "supports_is_honest", "Claims too much.", claims='features = ["async"]'),
    _plant("claims_too_little", "supports_is_honest", "Claims too little.", claims="num_speculative_tokens = [1, 4]"),
    _plant("q_of_other_temperature", "reported_q_is_what_was_drawn_from", "transformers#47932: q.", head=True, propose=_cold),
    _plant("q_of_other_draft", "reported_q_is_what_was_drawn_from", "q is one draft late.", head=True, propose=_shifted),
    _plant(
        "q_left_out", "reported_q_is_what_was_drawn_from", "Samples, but says it is deterministic.", head=True,
        propose=lambda self, batch: replace(HeadProposer.propose(self, batch), probabilities=None),
    ),
    _plant("q_sums_to_less", "reported_q_is_a_distribution", "q is not normalised.", head=True, propose=_unnormalised),
    _plant(
        "half_q", "reported_q_is_a_distribution", "q in half precision.", head=True,
        propose=lambda self, batch: replace(
            HeadProposer.propose(self, batch), probabilities=torch.ones(1, 1, HEAD_VOCABULARY, dtype=torch.float16)
        ),
    ),
    _plant(
        "hidden_of_rejected", "a_row_depends_on_its_request_alone", "Reads the batch's first hidden state.", head=True,
        scores=lambda self, batch, row: HeadProposer.scores(self, batch, 0),
    ),
    _plant(
        "any_vocabulary", "supports_is_honest", "sglang#23838: a head for another vocabulary.", head=True,
        supports=classmethod(lambda cls, query: ()),
    ),
)  # fmt: skip
"""The zoo of proposers."""
