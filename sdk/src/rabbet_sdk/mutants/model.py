"""Models with one fault each, on top of the strict twin."""

from __future__ import annotations

from typing import Any

import torch

from rabbet.contracts import Refusal, register_model
from rabbet.contracts.model import ModelQuery
from rabbet.weights import STANDARD_STACKS, WeightRules
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.model import StrictForCausalLM

__all__ = ["MUTANTS"]


@register_model("PositionsIgnored")
class PositionsIgnored(StrictForCausalLM):
    """Counts positions from the start of the step."""

    def forward(self, input_ids: Any, positions: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        """See ``Model``."""
        return super().forward(input_ids, positions - positions.min(), *rest, **options)


@register_model("RankAlone")
class RankAlone(StrictForCausalLM):
    """Each rank gives the logits of its own part of the vocabulary twice."""

    def compute_logits(self, hidden_TN: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""
        logits = super().compute_logits(hidden_TN)
        size = self.lm_head.part.padded
        return torch.cat((logits[:, :size], logits[:, :size]), dim=1)[:, : logits.shape[1]]


@register_model("NormsOptional")
class NormsOptional(StrictForCausalLM):
    """Norms that the checkpoint lacks keep their start values."""

    @classmethod
    def weight_rules(cls, config: Any) -> WeightRules:
        """See ``Model``."""
        return WeightRules(stacks=STANDARD_STACKS, optional=("*norm.weight",))


@register_model("RanksUnchecked")
class RanksUnchecked(StrictForCausalLM):
    """Accepts every number of ranks."""

    @classmethod
    def supports(cls, query: ModelQuery) -> tuple[Refusal, ...]:
        """See ``Model``."""
        return ()


def _mutant(target: type, caught_by: str, story: str) -> Mutant:
    name = target.__name__
    return Mutant(
        name=name, target=f"{__name__}:{name}", caught_by=f"test_{caught_by}", story=story,
    )  # fmt: skip


MUTANTS = (
    _mutant(PositionsIgnored, "logits_are_those_of_transformers", "chunks that begin at position 0"),
    _mutant(RankAlone, "two_ranks_equal_one", "a head that is not gathered"),
    _mutant(NormsOptional, "each_tensor_is_needed_and_no_other", "missing tensors pass unseen"),
    _mutant(RanksUnchecked, "supports_is_honest", "heads that do not divide are accepted"),
)
