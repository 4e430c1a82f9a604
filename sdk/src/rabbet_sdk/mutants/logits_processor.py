"""Logits processors with one fault each, on top of the strict twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rabbet.contracts import register_logits_processor
from rabbet_sdk.mutants.base import Mutant, planter
from rabbet_sdk.strict.logits_processor import StrictLogits

__all__ = ["MUTANTS"]

_plant = planter(globals(), register_logits_processor, StrictLogits)


def _by_row(self: Any, batch: Any) -> Any:
    return StrictLogits.apply(self, replace(batch, slots=range(len(batch.slots))))


def _add_wish(self: Any, slot: int, sampling: Any, prompt: Any) -> None:
    if sampling.extra_args:
        StrictLogits.add(self, slot, sampling, prompt)


def _one_row_a_request(self: Any, batch: Any) -> Any:
    last = dict(zip(batch.slots, batch.output_token_ids, strict=True))
    return StrictLogits.apply(self, replace(batch, output_token_ids=[last[slot] for slot in batch.slots]))


def _with_history(self: Any, batch: Any) -> Any:
    for slot, output in zip(batch.slots, batch.output_token_ids, strict=True):
        seen = self.context.options.setdefault(slot, [])
        seen += output[len(seen) :]
    seen = self.context.options
    return StrictLogits.apply(self, replace(batch, output_token_ids=[seen[slot] for slot in batch.slots]))


def _forget(self: Any, slot: int) -> None:
    self.spans.pop(slot, None)
    self.context.options.pop(slot, None)


def _unlimited(self: Any, slot: int, sampling: Any, _prompt: Any) -> None:
    self.spans[slot] = (sampling.extra_args or {}).get("no_repeat_last", 0)


def _sorted(self: Any, batch: Any) -> Any:
    result = StrictLogits.apply(self, batch)
    for output in batch.output_token_ids:
        output.sort()
    return result


def _noise(self: Any, batch: Any) -> Any:
    import torch

    logits = StrictLogits.apply(self, batch)
    wanted = [bool(self.spans.get(slot)) for slot in batch.slots]
    return torch.where(torch.tensor(wanted)[:, None], logits + torch.rand(logits.shape) * 1e-3, logits)


def _centred(self: Any, batch: Any) -> Any:
    logits = StrictLogits.apply(self, batch)
    return logits - logits[logits.isfinite()].mean()


def _with_prompt(self: Any, slot: int, sampling: Any, prompt: Any) -> None:
    self.context.options.setdefault("prompts", []).append(prompt)
    StrictLogits.add(self, slot, sampling, prompt)


_spans: dict[int, int] = {}


def _init_shared(self: Any, context: Any) -> None:
    StrictLogits.__init__(self, context)
    self.spans = _spans


_TORCH = '''import torch
from rabbet.contracts import register_logits_processor
from rabbet_sdk.strict.logits_processor import StrictLogits

@register_logits_processor("heavy")
class Plugin(StrictLogits):
    """Imports torch at the top."""
'''

MUTANTS = (
    _plant("row_for_slot", "a_row_depends_on_its_request_alone", "Rows are taken for slots.", apply=_by_row),
    _plant("batch_mean", "a_row_depends_on_its_request_alone", "Centres over the whole batch.", apply=_centred),
    _plant(
        "stale_slot", "slots_are_used_again", "The next request of a slot inherits the last one's wish.",
        add=_add_wish, remove=lambda _self, _slot: None,
    ),
    _plant(
        "one_row_a_request", "verified_drafts_are_rows_of_one_slot", "Drafts are masked by what follows them.",
        apply=_one_row_a_request,
    ),
    _plant(
        "own_history", "rejected_drafts_leave_nothing", "Counts rejected drafts as output.",
        apply=_with_history, remove=_forget,
    ),
    _plant("nothing_left", "a_token_is_left", "Bans a whole small vocabulary.", add=_unlimited),
    _plant(
        "false_invariance", "greedy_rows_may_skip_only_what_keeps_the_likeliest", "Greedy requests lose their wish.",
        is_argmax_invariant=True,
    ),
    _plant("sorts_output", "batch_belongs_to_the_engine", "Sorts the engine's own lists.", apply=_sorted),
    _plant("own_noise", "all_ranks_agree", "Breaks ties with global random numbers, other ones a rank.", apply=_noise),
    _plant("checks_nothing", "requests_are_checked", "Bad values fail in the engine.", validate=lambda _sampling: None),
    _plant("shared_slots", "two_processors_share_no_state", "A module's global by slot.", __init__=_init_shared),
    _plant("keeps_prompts", "requests_that_are_gone_cost_no_memory", "Prompts of all requests stay.", add=_with_prompt),
    Mutant(
        name="heavy", caught_by="test_front_end_needs_no_torch", modules={"plugin.py": _TORCH},
        story="the front process pays for torch",
    ),
)  # fmt: skip
"""The zoo of logits processors."""
