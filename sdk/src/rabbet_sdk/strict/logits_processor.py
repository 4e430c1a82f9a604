"""A logits processor that keeps tokens from coming again at once.

A request asks for it with ``extra_args={"no_repeat_last": N}``: none of its last N output tokens may come next.
torch is imported for type checkers only, because the front end loads this module to call ``validate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rabbet.contracts import register_logits_processor
from rabbet.contracts.logits_processor import LogitsBatch, LogitsProcessor, LogitsProcessorContext
from rabbet.errors import InvalidRequestError
from rabbet_sdk.strict import seal

if TYPE_CHECKING:
    import torch

    from rabbet.types.sampling import SamplingParams

__all__ = ["StrictLogits"]

_FIELD = "no_repeat_last"
_MOST = 64


@register_logits_processor("strict")
@seal
class StrictLogits(LogitsProcessor):
    """Keeps one number a slot; what was generated stands in each batch, so that rejected drafts leave nothing here."""

    @classmethod
    def validate(cls, sampling: SamplingParams) -> None:
        """Refuse what is no number from 0 to 64."""
        span = (sampling.extra_args or {}).get(_FIELD, 0)
        if not isinstance(span, int) or isinstance(span, bool) or not 0 <= span <= _MOST:
            message = f"extra_args.{_FIELD} is {span!r}; give a whole number from 0 to {_MOST}"
            raise InvalidRequestError(message, field=f"extra_args.{_FIELD}", value=span)

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.spans: dict[int, int] = {}

    def add(self, slot: int, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Remember what the request of this slot wants."""
        span = (sampling.extra_args or {}).get(_FIELD, 0)
        # One token must be left to choose, however small the vocabulary is.
        self.spans[slot] = min(span, self.context.vocab_size - 1)

    def remove(self, slot: int) -> None:
        """Forget it: the slot's next request may want nothing."""
        self.spans.pop(slot, None)

    def apply(self, batch: LogitsBatch) -> torch.Tensor:
        """Minus infinity for the latest tokens of each row."""
        rows: list[int] = []
        token_ids: list[int] = []
        for row, (slot, output) in enumerate(zip(batch.slots, batch.output_token_ids, strict=True)):
            span = self.spans.get(slot, 0)
            latest = sorted(set(output[-span:])) if span else []
            rows += [row] * len(latest)
            token_ids += latest
        # One write for the whole batch: a write a row would cost more than all the rest.
        if rows:
            batch.logits_BV[rows, token_ids] = float("-inf")
        return batch.logits_BV
