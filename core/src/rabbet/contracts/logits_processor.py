"""Contract of a logits processor: engine-wide, vectorised over the batch, chosen by a server flag.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rabbet.types.sampling import SamplingParams

__all__ = ["LogitsBatch", "LogitsProcessor", "LogitsProcessorContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsProcessorContext:
    """Built once a rank."""

    device: torch.device
    max_num_requests: int
    vocab_size: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsBatch:
    """The rows of one step. Valid during the call.

    Attributes:
        logits_BV: float32 [B, V].
        slots: Slot of each row. One stands several times where drafts are verified.
        output_token_ids: For each row the tokens generated before it, drafts included; not to be changed.
    """

    logits_BV: torch.Tensor
    slots: Sequence[int]
    output_token_ids: Sequence[Sequence[int]]


class LogitsProcessor(ABC):
    """Changes logits of some rows. A row's result depends on that row's request alone."""

    is_argmax_invariant: bool = False
    """Whether the likeliest token always stays the likeliest, so that greedy rows may skip it."""

    @classmethod
    def validate(cls, sampling: SamplingParams) -> None:
        """Check ``sampling.extra_args`` in the front end.

        Raises:
            rabbet.errors.ClientError: Naming the field.
        """
        return None

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.context = context

    @abstractmethod
    def add(self, slot: int, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """A request takes a slot. Slots are used again after ``remove``."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """The request of a slot is gone."""

    @abstractmethod
    def apply(self, batch: LogitsBatch) -> torch.Tensor:
        """Change ``batch.logits_BV`` in place and return it, or return another tensor of its shape and type."""
